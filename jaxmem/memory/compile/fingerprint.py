"""A lowered module as text that depends on the program alone.

JAX writes the whole call stack of each operation into a module. The innermost line is
part of the fingerprint, because the report shows it; the line of the call is not.
"""

import re

_LOCATION = re.compile(r"#loc\d*\b")
_PREFIX = "jit(step)"  # `flat_function` calls each step so
_NOWHERE = re.compile(r"loc\(loc\(\"jit\(step\)\"\(.*$")
_SOLE = re.compile(
    r"    %0(?::(?P<count>\d+))? = call "
    r"@(?P<name>\"[^\"]*\"|[\w.$]+)\((?P<given>[^)]*)\)"
)
_CALL = re.compile(r"loc\(callsite\((#loc\d*) at ")


def fingerprint(module: bytes, text: str | None) -> bytes:
    """The bytes that the key of a result is a hash of.

    Of a module that is too large to print the whole stack is part of the key.
    """
    if text is None:
        return module
    return "\n".join(without_jit(without_callers(text))).encode()


def without_callers(text: str) -> list[str]:
    """The module's lines, with the innermost frame instead of each location."""
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

    return [expand(line) for line in lines if not line.startswith("#loc")]


def without_jit(lines: list[str]) -> list[str]:
    """The module with a `main` that is not just a call of another function."""
    # The `main` of a jitted step only calls the step, and the names of the operations
    # inside do not begin with that of `main`.
    start, end = _function(lines, "@main(")
    main, rest = lines[start + 1 : end], lines[end:]
    while (called := _sole_call(main)) is not None:
        first, last = _function(rest, f"@{called}(")
        main, rest = rest[first + 1 : last], [*rest[:first], *rest[last + 1 :]]
    main = [_NOWHERE.sub("loc(loc(unknown))", line) for line in main]
    main = [line.replace(f'"{_PREFIX}/', '"') for line in main]
    # the location of a function's end is that of its definition, not of the program
    main = [x.split(" loc(")[0] if x.startswith("    return") else x for x in main]
    rest = ["  }" if line.startswith("  } loc(") else line for line in rest]
    return [*lines[: start + 1], *main, *rest]


def _function(lines: list[str], name: str) -> tuple[int, int]:
    """The numbers of the first and the last line of a function."""
    start = next(
        i for i, x in enumerate(lines) if x.startswith("  func.func") and name in x
    )
    ends = range(start + 1, len(lines))
    return start, next(i for i in ends if lines[i].startswith("  }"))


def _sole_call(body: list[str]) -> str | None:
    """The function that a body only calls, with all arguments in order; or None."""
    if len(body) != 2 or not (call := _SOLE.match(body[0])):
        return None
    given = re.findall(r"%arg(\d+)", call["given"])
    results = [f"%0#{i}" for i in range(int(call["count"] or 0))] or ["%0"]
    returned = body[1].split(" : ")[0].removeprefix("    return ").split(", ")
    in_order = given == [str(i) for i in range(len(given))]
    return call["name"] if in_order and returned == results else None
