"""Which region of a list of equations pays, and in how many parts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxmem.ir.scans import size_of
from jaxmem.ir.shard_labels import labelled_spreads
from jaxmem.ir.shards import InputSpreads
from jaxmem.scheduling.tiling.live_bytes import Figures, LiveBytes
from jaxmem.scheduling.tiling.loop import tiled
from jaxmem.scheduling.tiling.price import seconds
from jaxmem.scheduling.tiling.regions import (
    Region,
    RegionGraph,
    find,
    has_product,
    in_more_parts,
    inner,
)

_SEEDS = 4  # the largest arrays, from which regions are looked for
# of the seed's size: arrays from which operations are tied to it
_LARGE, _SMALL = 4, 16
_GAIN = 0.05  # of what is alive: a region that saves less is not worth a loop
_MUCH = 0.95  # of the bytes with fewer parts: more parts must take less than that
_ALIKE = 0.05  # of what is alive: savings that differ by less are alike
_NOTHING = 1e-4  # seconds: less is not told from none
_LIKE = 0.9  # of the bytes in other parts: what is in cheaper ones
_FEWER = 0.8  # of the seconds in so many parts at once: what two loops may take
_MOST = 1024  # parts


@dataclass(frozen=True)
class Asked:
    """What regions are to take.

    Attributes:
      limit: bytes of arrays that only a region has.
      n: how many parts, whatever they take; None: as few as take it below the limit.
    """

    limit: int
    n: int | None


@dataclass(frozen=True)
class Found:
    """A region, the array it was found from, its bytes, and seconds of its tiles."""

    region: Region
    seed: Any
    figures: Figures
    seconds: float

    def reaches(self, limit: int) -> bool:
        """Whether one part is below a limit."""
        return self.figures.inside <= self.region.n * limit

    def is_like(self, other: "Found") -> bool:
        """Whether as much is in parts, and each part so much smaller."""
        figures, n = self.figures, self.region.n
        most = _LIKE * min(other.figures.inside, other.figures.before * (1 - 1 / n))
        return figures.inside >= most and figures.gain >= most * (1 - 1 / n)


class ListRegions:
    """The regions of a list of equations, by the number of parts.

    They do not depend on a limit: one that is lower looks at more parts. So what has
    been found is kept, and so are the lists that loops of regions make of this one.
    """

    def __init__(self, closed, target: str, given: InputSpreads | None = None):
        """`closed`: a `prepared` list; `target`: the chip whose rates count."""
        self.graph = RegionGraph(closed, labelled_spreads(closed, given))
        self.given = given  # how its inputs are spread over devices
        self.target = target
        self._live = LiveBytes(self.graph)
        self._found: dict[tuple[int, bool], list[Found]] = {}
        # the last that was found from an array, along an axis, within a hull
        self._fewer: dict[tuple[Any, int, int], Region] = {}
        self._tiled: dict[int, tuple[Region, ListRegions]] = {}

    def in_parts(self, count: int, exactly: bool) -> list[Found]:
        """Those that save bytes in `count` parts, or in up to twice as many."""
        if (count, exactly) not in self._found:
            self._found[count, exactly] = list(self._candidates(count, exactly))
        return self._found[count, exactly]

    def tiled(self, region: Region) -> "ListRegions":
        """The list in which one of its regions is a loop."""
        if id(region) not in self._tiled:
            made = ListRegions(tiled(self.graph, region), self.target, self.given)
            self._tiled[id(region)] = region, made
        return self._tiled[id(region)][1]

    def _candidates(self, count: int, exactly: bool) -> Iterator[Found]:
        for region, seed in self._regions(count, exactly):
            # what is elementwise only, XLA fuses: an optimizer's update, in place
            if not has_product(self.graph, region):
                continue
            figures = self._live.of(region)
            if figures.gain > _GAIN * figures.before:
                cost = seconds(self.graph.eqns, region, self.target, self.graph.spreads)
                yield Found(region, seed, figures, cost)

    def _regions(self, count: int, exactly: bool) -> Iterator[tuple[Region, Any]]:
        for v in self._seeds:
            for axis, length in enumerate(v.aval.shape):
                n = _parts(length // self.graph.shards(v, axis), count, exactly)
                if n is None:
                    continue
                size = self.graph.size(v)
                floors = size // _LARGE, size // _SMALL, 0
                # what large arrays tie to it is often what all arrays do
                hulls = {self.graph.hull(v, floor): floor for floor in floors}
                for hull, floor in hulls.items():
                    yield self._region(v, axis, n, hull, floor), v

    @cached_property
    def _seeds(self) -> list[Any]:
        made = [v for v, i in self.graph.maker.items() if _is_seed(self.graph, i)]
        return sorted(made, key=self.graph.size, reverse=True)[:_SEEDS]

    def _region(self, v, axis: int, n: int, hull: int, floor: int) -> Region:
        fewer = self._fewer.get((v, axis, hull))
        region = None if fewer is None else in_more_parts(self.graph, fewer, n)
        if region is None:
            region = find(self.graph, v, axis, n, floor)
        self._fewer[v, axis, hull] = region
        return region


def _is_seed(graph: RegionGraph, i: int) -> bool:
    """Whether regions are looked for from what an equation makes."""
    # not from masks, which have the axes of what they are for, nor from what was there
    name = graph.eqns[i].primitive.name
    return name not in ("scan", "dynamic_update_slice") and i not in graph.drawn


def best(regions: ListRegions, asked: Asked, further: bool = False) -> Found | None:
    """The region that saves most, in as few parts as take it below the limit.

    `further`: whether parts that are above it are looked at once more. None where no
    region is above the limit, or nothing is gained.
    """
    graph, chosen = regions.graph, None
    cheap: list[Found] = []
    for count in [asked.n] if asked.n else _counts():
        found = regions.in_parts(count, asked.n is not None)
        found = [one for one in found if one.figures.inside > asked.limit]
        if not found:
            continue
        first = _largest_gain(found)
        if first.reaches(asked.limit):
            outers = [one for one in cheap if one.is_like(first)]
            large = {
                v for v in inner(graph, first.region) if graph.size(v) > asked.limit
            }
            # none of what is too large may stand whole at their border
            outers = [one for one in outers if large <= inner(graph, one.region)]
            # cheap parts, and parts of them, where that is less than so many at once
            times = [(_of_both(graph.eqns, one, first), one) for one in outers]
            least, outer = min(times, key=lambda pair: pair[0], default=(0.0, first))
            return outer if least <= _FEWER * first.seconds else first
        if chosen is None or first.figures.after < _MUCH * chosen.figures.after:
            chosen = first
        cheap += [first] if further else []
    return chosen


def _of_both(eqns: Sequence[Any], outer: Found, inner: Found) -> float:
    """Seconds of tiles inside of tiles: only sums that the outer ones cut are less."""
    size = lambda i: size_of(eqns[i].outvars[0])
    summed = [i for i in inner.region.eqns if inner.region.is_sum(i)]
    region = outer.region
    cut = (i for i in summed if i in region.eqns and not region.is_sum(i))
    smaller = sum(map(size, cut))
    share = smaller / max(1, sum(map(size, summed)))
    return outer.seconds + inner.seconds * (1 - share + share / region.n)


def _counts() -> Iterator[int]:
    count = 2
    while count <= _MOST:
        yield count
        count *= 2


def _largest_gain(found: list[Found]) -> Found:
    """Of those that save about as much the one that costs clearly least."""

    def value(one: Found):
        gain = int(one.figures.gain / (_ALIKE * one.figures.before))
        cost = round(math.log2(one.seconds + _NOTHING))
        return gain, -cost, one.figures.inside, len(one.region.eqns)

    return max(found, key=value)


def _parts(size: int, count: int, exactly: bool) -> int | None:
    """How many parts an axis is cut in: the least from `count` to twice as many."""
    counts = range(count, count + 1 if exactly else 2 * count)
    return next((n for n in counts if n <= size and size % n == 0), None)
