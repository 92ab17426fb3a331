"""What the text of one instruction says: its elements, its computation, its axes."""

import re
from collections.abc import Iterator

from jaxmem.memory.buffers.hlo import Hlo, Instruction
from jaxmem.memory.buffers.shapes import arrays_of


def elements_of(shape: str) -> int:
    """Of the largest array of a shape."""
    return max((a.elements for a in arrays_of(shape)), default=0)


def inside(hlo: Hlo, made: Instruction) -> Iterator[Instruction]:
    """The instructions of the computations that one calls."""
    for called in made.called:
        yield from hlo.body(called)


def layout(shape: str) -> list[int]:
    """The axes of an array, that of neighbours in memory last."""
    found = re.search(r"\{([\d,]+)", shape)
    return [int(n) for n in found.group(1).split(",")][::-1] if found else []
