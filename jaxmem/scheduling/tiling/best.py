"""Which region of a list of equations pays, and in how many parts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxmem.ir.scans import size_of
from jaxmem.scheduling.tiling.live_bytes import Figures, LiveBytes
from jaxmem.scheduling.tiling.regions import Region, RegionGraph, find, has_product

_SEEDS = 4  # the largest arrays, from which regions are looked for
_SMALL = 16  # of the seed's size: arrays from which operations are tied to it
_GAIN = 0.05  # of what is alive: a region that saves less is not worth a loop
_MUCH = 0.95  # of the bytes with fewer parts: more parts must take less than that
_MOST = 1024  # parts


@dataclass(frozen=True)
class Found:
    """A region, the array it was found from, and what it needs."""

    region: Region
    seed: Any
    figures: Figures


def best(graph: RegionGraph, limit: int, n: int | None = None) -> Found | None:
    """The region that saves most, in as few parts as take it below a limit.

    `limit`: bytes of arrays that only the region has. None where no region is above the
    limit, or nothing is gained.
    """
    live, chosen = LiveBytes(graph), None
    for count in [n] if n else _counts():
        found = _largest_gain(graph, live, count, limit)
        if found is None:
            continue
        if chosen is None or found.figures.after < _MUCH * chosen.figures.after:
            chosen = found
        if found.figures.inside <= count * limit:
            break
    return chosen


def _counts() -> Iterator[int]:
    count = 2
    while count <= _MOST:
        yield count
        count *= 2


def _largest_gain(
    graph: RegionGraph, live: LiveBytes, n: int, limit: int
) -> Found | None:
    chosen = score = None
    for region, seed, is_wide in _regions(graph, n):
        # what is elementwise only, XLA fuses: an optimizer's update, in place
        if not has_product(graph, region):
            continue
        figures = live.of(region)
        if figures.inside <= limit or figures.gain <= _GAIN * figures.before:
            continue
        value = figures.gain, not is_wide, figures.inside
        if score is None or value > score:
            chosen, score = Found(region, seed, figures), value
    return chosen


def _regions(graph: RegionGraph, n: int) -> Iterator[tuple[Region, Any, bool]]:
    made = [v for v, i in graph.maker.items() if graph.eqns[i].primitive.name != "scan"]
    for v in sorted(made, key=size_of, reverse=True)[:_SEEDS]:
        for axis, size in enumerate(v.aval.shape):
            if size % n:
                continue
            for floor in (size_of(v) // _SMALL, 0):
                yield find(graph, v, axis, n, floor), v, floor == 0
