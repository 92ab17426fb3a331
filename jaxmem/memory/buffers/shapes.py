"""Shapes as XLA writes them: `(bf16[24,8]{1,0:T(8,128)S(1)}, s32[])`."""

import math
import re
from dataclasses import dataclass
from functools import lru_cache

_ARRAY = re.compile(r"\b([a-z]+\d*)([a-z\d]*)\[([\d,]*)\](\{[^}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")


@dataclass(frozen=True)
class HloArray:
    """One array of a shape.

    Attributes:
        dtype: XLA's name: "bf16", "f8e4m3fn".
        sizes: of its axes.
        space: the memory that it is in: 0 the chip's own, 1 a TPU's vector memory, 5
            the host's.
    """

    dtype: str
    sizes: tuple[int, ...]
    space: int = 0

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.sizes)

    @property
    def bits(self) -> int:
        """Of one number."""
        if self.dtype == "pred":
            return 8
        found = re.match(r"[a-z]+(\d+)", self.dtype)
        return int(found.group(1)) if found else 8

    @property
    def bytes(self) -> int:
        """Of all its numbers, without padding."""
        return -(-self.elements * self.bits // 8)


def integers(text: str) -> tuple[int, ...]:
    """The numbers of a list such as `2,4`, which may be empty."""
    return tuple(int(n) for n in text.split(",") if n.strip())


@lru_cache(maxsize=4096)
def arrays_of(shape: str) -> tuple[HloArray, ...]:
    """The arrays of a shape, those of inner tuples too; none of a token."""
    found = (m for m in _ARRAY.finditer(shape) if m.group(1) != "token")
    return tuple(map(_array, found))


def elements_of(shape: str) -> tuple[str, ...]:
    """The shapes of a tuple's elements; the shape itself where it is none."""
    if not shape.startswith("("):
        return (shape,)
    parts, depth, start = [], 0, 1
    for i, letter in enumerate(shape):
        depth += letter in "([{"
        depth -= letter in ")]}"
        if depth == (0 if letter == ")" else 1) and letter in ",)":
            parts.append(shape[start:i])
            start = i + 1
        if depth == 0:
            break
    bare = (re.sub(r"/\*.*?\*/", "", part).strip() for part in parts)
    return tuple(part for part in bare if part)


def _array(match: re.Match[str]) -> HloArray:
    kind, rest, sizes, layout = match.groups()
    space = _SPACE.search(layout or "")
    return HloArray(kind + rest, integers(sizes), int(space.group(1)) if space else 0)
