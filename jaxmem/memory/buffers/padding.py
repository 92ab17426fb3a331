"""Bytes by which a TPU's tiles make an array larger than its elements.

The two minor axes of a layout are in tiles, as of 8 by 128 numbers, and the last tile
of an axis is filled up. An axis of 2 that is the minor one takes 64 times its bytes.
The compiler chooses the order of the axes and the tiles: only its own text tells.
"""

import re
from dataclasses import dataclass

from jaxmem.memory.buffers.shapes import arrays_of, integers

_LAYOUT = re.compile(r"\]\{([\d,]*):(T\(([\d,]+)\)[^}]*)\}")
_ELSEWHERE = re.compile(r"S\(\d+\)")


@dataclass(frozen=True)
class PaddedAxis:
    """An axis that tiles make longer.

    Attributes:
        axis: its number, as the user counts axes.
        size: its elements.
        padded: what it is filled up to.
    """

    axis: int
    size: int
    padded: int


def padding_of(shape: str, size: int) -> int:
    """Of `size` bytes of an array, as assigned, those that no element fills."""
    # Without tiles there is no padding: what is larger then is aligned.
    if not _LAYOUT.search(shape) or shape.startswith("("):
        return 0
    return max(size - sum(a.bytes for a in arrays_of(shape)), 0)


def layout_of(shape: str) -> str:
    """`{1,0:T(8,128)}` of a shape that XLA writes; empty where it has no tiles."""
    found = _LAYOUT.search(shape)
    if not found or shape.startswith("("):
        return ""
    return f"{{{found.group(1)}:{_ELSEWHERE.sub('', found.group(2))}}}"


def padded_axes(sizes: tuple[int, ...], layout: str) -> tuple[PaddedAxis, ...]:
    """The axes that the tiles of a layout make longer, by how often, the most first."""
    found = _LAYOUT.search(f"[]{layout}")
    if not found:
        return ()
    minor_first, tile = map(integers, found.group(1, 3))
    pairs = zip(minor_first, reversed(tile), strict=False)
    up = lambda size, unit: -(-size // unit) * unit
    axes = (PaddedAxis(axis, sizes[axis], up(sizes[axis], n)) for axis, n in pairs)
    longer = [one for one in axes if one.padded > one.size]
    return tuple(sorted(longer, key=lambda one: -one.padded / max(one.size, 1)))
