"""The regions of a list of equations that save bytes, by the number of parts."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from jaxmem.cost.live_bytes import LiveBytes
from jaxmem.ir import primitives
from jaxmem.ir.placements import Shard
from jaxmem.ir.shard_labels import labelled_shardings
from jaxmem.ir.shards import InputShardings
from jaxmem.scheduling._remembered import Remembered
from jaxmem.scheduling.tiling.loop import tiled
from jaxmem.scheduling.tiling.price import Figures, RegionBytes, seconds
from jaxmem.scheduling.tiling.regions import (
    Region,
    RegionGraph,
    find,
    has_product,
    in_more_parts,
)

_SEEDS = 4  # the largest arrays, from which regions are looked for
# of the seed's size: arrays from which operations are tied to it
_LARGE, _SMALL = 4, 16
# Of what is alive: less is not told from nothing. Predicted peaks are further off on a
# quarter of the steps of `benchmarks.predict`.
ALIKE = 0.05
_LIKE = 0.9  # of the bytes in other parts: what is in cheaper ones


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

    def __init__(self, closed, target: str, given: InputShardings | None = None):
        """`closed`: a `prepared` list; `target`: the chip whose rates count."""
        self.graph = RegionGraph(closed, labelled_shardings(closed, given))
        self.given = given  # how its inputs are sharded over devices
        self.target = target
        self._live = LiveBytes(self.graph, self.graph.shardings)
        self._found: dict[tuple[int, bool], list[Found]] = {}
        # the last that was found from an array, along an axis, within a hull
        self._fewer: dict[tuple[Any, int, int], Region] = {}
        self._bytes = Remembered()  # the same of a region in more parts
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
            make = partial(RegionBytes.of, self._live, region)
            held = self._bytes.get("bytes", (region.placed,), make)
            figures = held.in_parts(region.n)
            if figures.gain > ALIKE * figures.before:
                about = self.target, self.graph.shardings
                cost = seconds(self.graph.eqns, region, *about)
                yield Found(region, seed, figures, cost)

    def _regions(self, count: int, exactly: bool) -> Iterator[tuple[Region, Any]]:
        # Arrays of equal layers tie each other in the same way: one that a region cuts
        # along an axis is the seed of the same region.
        known: dict[tuple[int, int], list[Region]] = {}
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
                    alike = known.setdefault((hull, n), [])
                    if any(_cuts(self.graph, one, v, axis) for one in alike):
                        continue
                    alike.append(self._region(v, axis, n, hull, floor))
                    yield alike[-1], v

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
    eqn = graph.eqns[i]
    other = primitives.is_scan(eqn) or primitives.is_update(eqn)
    return not other and i not in graph.drawn


def _cuts(graph: RegionGraph, region: Region, v, axis: int) -> bool:
    """Whether a region makes an array, and in parts along an axis."""
    return graph.maker[v] in region.eqns and region.at(v) == Shard(axis)


def _parts(size: int, count: int, exactly: bool) -> int | None:
    """How many parts an axis is cut in: the least from `count` to twice as many."""
    counts = range(count, count + 1 if exactly else 2 * count)
    return next((n for n in counts if n <= size and size % n == 0), None)
