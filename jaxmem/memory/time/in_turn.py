"""What a GPU's blocks of threads do one after another: sums of columns, sorts, heaps.

XLA sums columns in blocks of 32 of them, each of which takes its rows in groups of 32.
Where it writes something for each row, loads wait for one another: a narrow matrix
keeps few processors busy, and each of them waits. Found in profiles of an H200.
"""

import math
from dataclasses import dataclass

from jaxmem.cost.kernel import Access
from jaxmem.memory.buffers.hlo import Hlo, Instruction
from jaxmem.memory.buffers.shapes import arrays_of
from jaxmem.memory.time.reading import elements_of, inside

_SIDE = 32  # columns of a block, and rows that it takes at once
_CACHED = 0.2  # of a load's time, where the operand is small
_HEAP = 16  # loads in a row, in terms of time, for each element that a heap keeps
_HEAPS = 4  # small blocks that fit where one of 1024 threads does
_PAIRS = 2048  # elements of a sort that a block compares at once


@dataclass(frozen=True)
class Reduction:
    """A sum over the rows of an array seen as [blocks, rows, columns].

    Attributes:
        elements: of the array.
        rows: that are summed.
        columns: that remain; one where the sum is along the last axis.
    """

    elements: int
    rows: int
    columns: int


def reductions(hlo: Hlo, made: Instruction) -> list[Reduction]:
    """The sums, and the like, of a fusion."""
    plain = (one for one in inside(hlo, made) if one.opcode == "reduce")
    return [_reduction(hlo, one) for one in plain]


def _reduction(hlo: Hlo, made: Instruction) -> Reduction:
    sizes = arrays_of(hlo.shape_of(made.operands[0]))[0].sizes
    summed = [axis for axis in made.listed("dimensions") if sizes[axis] > 1]
    rows = math.prod(sizes[axis] for axis in summed)
    inner = math.prod(sizes[max(summed, default=-1) + 1 :])
    return Reduction(math.prod(sizes), rows, inner)


def sums(hlo: Hlo, made: Instruction, one: Reduction) -> Access:
    """Sums along rows keep all processors busy; those along columns may not."""
    if one.columns == 1:
        return Access(phases=True)
    outer = one.elements // (one.rows * one.columns)
    sizes = [elements_of(hlo.shape_of(name)) for name in made.operands]
    large = sum(size >= one.elements for size in sizes)
    stores = elements_of(made.shape) >= one.elements
    loads = large + _CACHED * (sum(size > 1 for size in sizes) - large) * stores
    rows = math.ceil(one.rows / _SIDE)
    return Access(
        rows=rows,
        columns=outer * math.ceil(one.columns / _SIDE),
        loads=loads,
        stores=stores,
    )


def heaps(made: Instruction) -> Access:
    """A block for each row keeps the largest in a heap, one after another."""
    kept = arrays_of(made.shape)[0].sizes[-1]
    blocks = math.ceil(elements_of(made.shape) / kept / _HEAPS)
    return Access(rows=_HEAP * kept, columns=blocks, loads=1.0, stores=True)


def sorted_rows(made: Instruction) -> Access:
    """Pairs are compared in one stage after another, a row in one block or several."""
    sizes, (axis,) = arrays_of(made.shape)[0].sizes, made.listed("dimensions")
    length = sizes[axis]
    steps = math.ceil(math.log2(max(2, length)))
    blocks = math.prod(sizes) // length * math.ceil(length / (2 * _PAIRS))
    loads = max(1.0, min(length, 2 * _PAIRS) / _PAIRS)
    stages = steps * (steps + 1) // 2
    return Access(rows=stages, columns=blocks, loads=loads, stores=True)
