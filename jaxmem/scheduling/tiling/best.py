"""Which region of a list of equations pays, and in how many parts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxmem.ir.scans import size_of
from jaxmem.scheduling.tiling.regions import (
    Region,
    RegionGraph,
    find,
    has_product,
    inner,
    peak,
)

_SEEDS = 4  # the largest arrays, from which regions are looked for
_SMALL = 16  # of the seed's size: arrays from which operations are tied to it
_GAIN = 0.1  # of the peak: a region that holds less inside is not worth a loop
_MUCH = 0.9  # of the peak with fewer parts: more parts must take less than that
_MOST = 64  # parts


@dataclass(frozen=True)
class Found:
    """A region, the array it was found from, and the bytes before and after."""

    region: Region
    seed: Any
    before: int
    after: int


def best(graph: RegionGraph, limit: int, n: int | None = None) -> Found | None:
    """The region that takes a list's bytes below a limit with the fewest parts.

    Where none does, the one that takes them lowest; None where nothing is gained.
    """
    before = peak(graph)
    if before <= limit:
        return None
    chosen = None
    for count in [n] if n else _counts():
        found = _largest_gain(graph, count, before)
        if found is None:
            continue
        if chosen is None or found.after < _MUCH * chosen.after:
            chosen = found
        if found.after <= limit:
            break
    return chosen


def _counts() -> Iterator[int]:
    count = 2
    while count <= _MOST:
        yield count
        count *= 2


def _largest_gain(graph: RegionGraph, n: int, before: int) -> Found | None:
    """The region with the least peak, then with the most inside."""
    chosen = score = None
    for region, seed, is_wide in _regions(graph, n):
        inside = sum(map(size_of, inner(graph, region)))
        # what is elementwise only, XLA fuses: an optimizer's update, in place
        if inside <= _GAIN * before or not has_product(graph, region):
            continue
        after = peak(graph, region)
        figures = after, is_wide, -inside
        if after < before and (score is None or figures < score):
            chosen, score = Found(region, seed, before, after), figures
    return chosen


def _regions(graph: RegionGraph, n: int) -> Iterator[tuple[Region, Any, bool]]:
    made = [v for v, i in graph.maker.items() if graph.eqns[i].primitive.name != "scan"]
    for v in sorted(made, key=size_of, reverse=True)[:_SEEDS]:
        for axis, size in enumerate(v.aval.shape):
            if size % n:
                continue
            for floor in (size_of(v) // _SMALL, 0):
                yield find(graph, v, axis, n, floor), v, floor == 0
