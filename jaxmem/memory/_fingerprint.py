"""A lowered module as text that depends on the program alone.

JAX writes the whole call stack into a module. The line an operation was written on
belongs to it (the report shows it), the line that called `estimate` does not.
"""

import re
from typing import Any

_LARGE = 64 * 2**20
_LOCATION = re.compile(r"#loc\d*\b")
_CALL = re.compile(r"loc\(callsite\((#loc\d*) at ")


def fingerprint(exported: Any) -> bytes:
    """What the key of a result is made of."""
    data = exported.mlir_module_serialized
    # large constants take long to print: then the stack is part of the key
    return data if len(data) > _LARGE else without_callers(exported.mlir_module())


def without_callers(text: str) -> bytes:
    """The module with each location written out, down to its innermost frame."""
    lines = text.splitlines()
    table = dict(line.split(" = ", 1) for line in lines if line.startswith("#loc"))
    known: dict[str, str] = {}

    def resolve(name: str) -> str:
        if name not in known:
            call = _CALL.match(table[name])
            known[name] = resolve(call.group(1)) if call else expand(table[name])
        return known[name]

    def expand(line: str) -> str:
        return _LOCATION.sub(lambda match: resolve(match.group()), line)

    body = (expand(line) for line in lines if not line.startswith("#loc"))
    return "\n".join(body).encode()
