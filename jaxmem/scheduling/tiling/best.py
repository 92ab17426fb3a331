"""Which region of a list of equations pays, and in how many parts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmem.ir.scans import size_of
from jaxmem.scheduling.tiling.live_bytes import Figures, LiveBytes
from jaxmem.scheduling.tiling.price import seconds
from jaxmem.scheduling.tiling.regions import Region, RegionGraph, find, has_product

_SEEDS = 4  # the largest arrays, from which regions are looked for
# of the seed's size: arrays from which operations are tied to it
_LARGE, _SMALL = 4, 16
_GAIN = 0.05  # of what is alive: a region that saves less is not worth a loop
_MUCH = 0.95  # of the bytes with fewer parts: more parts must take less than that
_ALIKE = 0.05  # of what is alive: savings that differ by less are alike
_NOTHING = 1e-4  # seconds: less is not told from none
_LIKE = 0.9  # of the bytes in other parts: what is in cheaper ones
_MOST = 1024  # parts


@dataclass(frozen=True)
class Asked:
    """What regions are to take.

    Attributes:
      limit: bytes of arrays that only a region has.
      n: how many parts, whatever they take; None: as few as take it below the limit.
      target: the chip whose rates say what tiles cost.
    """

    limit: int
    n: int | None
    target: str


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


def best(graph: RegionGraph, asked: Asked, further: bool = False) -> Found | None:
    """The region that saves most, in as few parts as take it below the limit.

    `further`: whether parts that are above it are looked at once more. None where no
    region is above the limit, or nothing is gained.
    """
    live, chosen = LiveBytes(graph), None
    cheap: list[Found] = []
    for count in [asked.n] if asked.n else _counts():
        found = list(_candidates(graph, live, count, asked))
        if not found:
            continue
        first = _largest_gain(found)
        if first.reaches(asked.limit):
            outers = [one for one in cheap if one.is_like(first)]
            # cheap parts, and parts of them, where that is less than so many at once
            times = [(_of_both(graph.eqns, one, first), one) for one in outers]
            least, outer = min(times, key=lambda pair: pair[0], default=(0.0, first))
            return outer if least < first.seconds / 2 else first
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


def _candidates(
    graph: RegionGraph, live: LiveBytes, count: int, asked: Asked
) -> Iterator[Found]:
    for region, seed in _regions(graph, count, asked.n is not None):
        # what is elementwise only, XLA fuses: an optimizer's update, in place
        if not has_product(graph, region):
            continue
        figures = live.of(region)
        much = figures.gain > _GAIN * figures.before
        if figures.inside > asked.limit and much:
            cost = seconds(graph.eqns, region, asked.target)
            yield Found(region, seed, figures, cost)


def _regions(
    graph: RegionGraph, count: int, exactly: bool
) -> Iterator[tuple[Region, Any]]:
    made = [v for v, i in graph.maker.items() if _is_seed(graph, i)]
    for v in sorted(made, key=size_of, reverse=True)[:_SEEDS]:
        for axis, size in enumerate(v.aval.shape):
            n = _parts(size // graph.shards(v, axis), count, exactly)
            if n is None:
                continue
            for floor in (size_of(v) // _LARGE, size_of(v) // _SMALL, 0):
                yield find(graph, v, axis, n, floor), v


def _is_seed(graph: RegionGraph, i: int) -> bool:
    """Whether regions are looked for from what an equation makes."""
    # not from masks, which have the axes of what they are for, nor from what was there
    name = graph.eqns[i].primitive.name
    return name not in ("scan", "dynamic_update_slice") and i not in graph.drawn


def _parts(size: int, count: int, exactly: bool) -> int | None:
    """How many parts an axis is cut in: the least from `count` to twice as many."""
    counts = range(count, count + 1 if exactly else 2 * count)
    return next((n for n in counts if n <= size and size % n == 0), None)
