"""Kernels that a lowered module calls, and which of them a compiler has accepted.

Their code is in the module as text that XLA hands to another compiler during code
generation, and may be refused there. A search compiles dozens of forms of a step that
call the same kernels: code is generated for the first alone.
"""

import hashlib
import re

# the custom calls that kernels are lowered to
_NAMES = ("mosaic_gpu", "tpu_custom_call", "triton")
_CALL = re.compile(r"custom_call @(\"[^\"]*\"|[\w.$]+)\([^)]*\) (\{.*\}) : \(")

_accepted: set[tuple[str, str]] = set()  # the chip, and a kernel's hash


def kernels_in(data: bytes, text: str | None) -> frozenset[str]:
    """Hashes of the kernels of a module, by its bytes and its text, if it was printed.

    Kernels that the text does not show are one, which no other module has.
    """
    if not any(name.encode() in data for name in _NAMES):
        return frozenset()
    called = (_CALL.search(line) for line in (text or "").splitlines())
    found = {f"{c[1]} {c[2]}" for c in called if c and any(n in c[1] for n in _NAMES)}
    return frozenset(map(_hash, found)) or frozenset({_hash(data)})


def _hash(code: str | bytes) -> str:
    return hashlib.sha256(code.encode() if isinstance(code, str) else code).hexdigest()


def accept(chip: str, kernels: frozenset[str]) -> None:
    """Remembers kernels of a module that was compiled to the end for a chip."""
    _accepted.update((chip, one) for one in kernels)


def are_accepted(chip: str, kernels: frozenset[str]) -> bool:
    """Whether all were in modules that this process knows to compile for a chip."""
    return all((chip, one) in _accepted for one in kernels)
