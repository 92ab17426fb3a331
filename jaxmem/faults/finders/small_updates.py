"""Small updates of a large array in a loop, as stacks of numbers are written."""

from collections.abc import Iterator
from typing import Any

from jaxmem import _compat
from jaxmem.faults.program import ProgramLevel, TracedProgram, levels
from jaxmem.ir import primitives
from jaxmem.ir.scans import size_of, ys_of

# Bytes of an update; the report has 256 on one kind of CPU and some 470 on another.
_SMALL = 480
_LEAST = 2**16  # bytes of an array that is seen to be written whole
# name -> the operand that is written


def small_updates(program: TracedProgram) -> Iterator[tuple[Any, str]]:
    """Finds updates of few bytes, in loops, of arrays that the loops carry or stack."""
    for level in levels(program.closed):
        for eqn in level.graph.eqns:
            if primitives.is_scan(eqn):
                yield from _stacked(eqn)
            elif (place := _place_of_update(eqn)) and _is_carried(level, eqn):
                update = eqn.invars[place]
                yield from _small(eqn, eqn.outvars[0], size_of(update))


def _place_of_update(eqn) -> int:
    """Which operand is written into the first; 0 where none is."""
    if primitives.is_update(eqn):
        return 1
    return 2 if eqn.primitive.name == "scatter" else 0


def _stacked(eqn) -> Iterator[tuple[Any, str]]:
    for stack in ys_of(eqn):
        yield from _small(eqn, stack, size_of(stack) // max(1, eqn.params["length"]))


def _small(eqn, array, update: int) -> Iterator[tuple[Any, str]]:
    if 0 < update < _SMALL and size_of(array) >= _LEAST:
        yield (
            eqn,
            f"a loop writes {update} bytes in each iteration into an array of "
            f"{size_of(array):,} bytes, which is written whole each time",
        )


def _is_carried(level: ProgramLevel, eqn) -> bool:
    around = level.eqn
    if around is None or not primitives.is_loop(around):
        return False
    start = 0
    if primitives.is_scan(around):
        start = _compat.scan_counts(around)[0]
    return level.root(eqn.invars[0]) in level.graph.arguments[start:]
