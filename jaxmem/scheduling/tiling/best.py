"""Which region of a list of equations pays, and in how many parts."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from jaxmem.scheduling.tiling.list_regions import ALIKE, Found, ListRegions
from jaxmem.scheduling.tiling.regions import RegionGraph, inner

_NOTHING = 1e-4  # seconds: less is not told from none
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
            times = [(_of_both(graph, one, first), one) for one in outers]
            least, outer = min(times, key=lambda pair: pair[0], default=(0.0, first))
            return outer if least <= _FEWER * first.seconds else first
        if chosen is None or first.figures.after < (1 - ALIKE) * chosen.figures.after:
            chosen = first
        cheap += [first] if further else []
    return chosen


def _of_both(graph: RegionGraph, outer: Found, inner: Found) -> float:
    """Seconds of tiles inside of tiles: only sums that the outer ones cut are less."""
    size = lambda i: graph.size(graph.eqns[i].outvars[0])
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
        gain = int(one.figures.gain / (ALIKE * one.figures.before))
        cost = round(math.log2(one.seconds + _NOTHING))
        return gain, -cost, one.figures.inside, len(one.region.eqns)

    return max(found, key=value)
