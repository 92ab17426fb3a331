"""Pairs of values of one allocation that have bytes in common while both are alive."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jaxmem.auditing._module import Module
from jaxmem.memory.buffers.assignment import BufferValue

# what may write a value over one that it reads, element by element or by contract
_NEVER_IN_PLACE = frozenset(
    "dot convolution transpose reverse gather reduce-window pad concatenate".split()
)


class Overlap(NamedTuple):
    """An older value, and a younger one written over it."""

    old: BufferValue
    new: BufferValue
    together: bool  # whether one instruction makes both
    updated: bool  # whether the younger one is made of the older one, in its place


@lru_cache(maxsize=1)  # for all rules of one module
def overlapping(module: Module) -> tuple[Overlap, ...]:
    """Those that are no legal updates in place."""
    every = (_of(module, module.data(one)) for one in module.allocations)
    return tuple(pair for found in every for pair in found)


def _of(module: Module, values: list[BufferValue]) -> Iterator[Overlap]:
    alive = module.lives.alive
    rows = [(v, a, b) for v in values for a, b in alive(v.key)]
    rows.sort(key=lambda row: row[1])
    starts = np.array([v.offset for v, _, _ in rows], np.int64)
    sizes = np.array([v.size for v, _, _ in rows], np.int64)
    firsts = np.array([a for _, a, _ in rows], np.int64)
    lasts = np.array([b for _, _, b in rows], np.int64)
    for i, (old, _, last) in enumerate(rows):
        stop = int(np.searchsorted(firsts, last, side="right"))
        after = slice(i + 1, stop)
        shared = (starts[after] < starts[i] + sizes[i]) & (
            starts[after] + sizes[after] > starts[i]
        )
        shared &= lasts[after] >= firsts[i]
        for j in np.nonzero(shared)[0] + i + 1:
            new, first = rows[j][0], rows[j][1]
            if new.key != old.key:
                yield from _judged(module, old, new, first, last)


def _judged(module, old, new, first: int, last: int) -> Iterator[Overlap]:
    together = old.name == new.name
    place = (old.offset, old.size) == (new.offset, new.size)
    reads = not together and old.key in module.operands(new.name)
    updated = place and reads
    made = module.hlo.instruction(new.name)
    legal = made is not None and made.opcode not in _NEVER_IN_PLACE
    ends = _ends(module, new.name, first)
    meanwhile = {
        use for use in module.lives.uses.get(old.key, ()) if first < use < max(ends)
    }
    is_done = last in ends and meanwhile <= ends
    if is_done and ((updated and legal) or module.is_part(old, new)):
        return
    if place and (module.passes_on(new) or module.is_carried_twice(old, new)):
        return
    yield Overlap(old, new, together, updated)


def _ends(module: Module, name: str, at: int) -> set[int]:
    """When an instruction, and what it is started in, is done with its operand."""
    found, ends = {at}, module.lives.ends
    while made := module.hlo.instruction(name):
        if name in ends:
            found.add(ends[name])
        name = module.hlo.callers.get(made.computation, "")
    return found
