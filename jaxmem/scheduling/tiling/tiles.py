"""The pass that runs parts of a step in tiles, where they hold too much at one time."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.shard_labels import labelled_shardings
from jaxmem.ir.shards import InputShardings
from jaxmem.scheduling._choice import Bytes, Count
from jaxmem.scheduling._pass import Level, has_level
from jaxmem.scheduling._remembered import Remembered
from jaxmem.scheduling._rewritten import Rewritten
from jaxmem.scheduling._searched import Front, SearchBound, Searched, SearchedStep
from jaxmem.scheduling.plan.rows import Description
from jaxmem.scheduling.tiling.best import Asked, best
from jaxmem.scheduling.tiling.list_regions import Found, ListRegions
from jaxmem.scheduling.tiling.loop import SCOPE, VOCABULARY
from jaxmem.scheduling.tiling.masks import with_shared_draws
from jaxmem.scheduling.tiling.prepared import prepared, with_whole_barriers
from jaxmem.scheduling.tiling.rows import row_of, whole_ones
from jaxmem.scheduling.tiling.tiled_front import (
    UNCERTAIN,
    Room,
    candidates_in_tiles,
    in_tiles,
)

_ROUNDS = 3  # regions of one list, side by side
_DEPTH = 2  # loops of regions in one another


@dataclass(frozen=True)
class Tiles:
    """How much a list of equations may hold while it runs."""

    name: ClassVar[str] = "tiles"
    # bytes that equations outside of loops, or those of one iteration of a scan, may
    # hold at one time before they run in tiles; None: nothing runs in tiles
    limit: Bytes | None = None
    # how many tiles, whatever they hold; None: as few as will do
    n: Count | None = None


@dataclass(frozen=True)
class Tile:
    """A region that runs in tiles, in the list of equations it was found in."""

    eqns: tuple[Any, ...]  # of the list
    found: Found
    times: int  # how often the list runs: the layers of its scan


@dataclass(frozen=True)
class TiledLists:
    """A level with its tiles."""

    jaxpr: Any
    tiles: tuple[Tile, ...]


class TileRegions(Searched[Tiles, TiledLists]):
    """What a list of equations holds at one time, less of it."""

    config = Tiles
    in_parts = True
    last = UNCERTAIN

    def analyse(self, level: Level, config: Tiles) -> Iterator[TiledLists]:
        # what runs in tiles already is left as it is
        eqns = jaxprs.split(level.jaxpr)[0].eqns
        regions = filter(_is_region, eqns)
        if config.limit is None or _is_own(level.loop) or any(regions):
            return
        in_scan = level.loop is not None and primitives.is_scan(level.loop)
        lists = _Lists(Asked(config.limit, config.n), level.target, level.known)
        jaxpr, tiles = lists.tiled(level.jaxpr, in_scan, level.shardings)
        if tiles:
            yield TiledLists(jaxpr, tuple(tiles))

    def apply(self, level: Level, rewrite: TiledLists):
        del level
        return rewrite.jaxpr

    def describe(self, rewrite: TiledLists, target: str) -> Description:
        rows = (row_of(t.eqns, t.found, t.times) for t in rewrite.tiles)
        notes = (note for t in rewrite.tiles for note in whole_ones(t.eqns, t.found))
        return Description(tiles=tuple(rows), notes=tuple(dict.fromkeys(notes)))

    def candidates(self, step: SearchedStep, bound: SearchBound) -> Front:
        alone = math.isfinite(bound.seconds)
        return candidates_in_tiles(step, tiles_to, bound, alone)

    def expected(self, step: SearchedStep, enough: float) -> Iterator[tuple[int, str]]:
        least = step.front[-1:]
        for one in in_tiles(step.traced, least, tiles_to, Room(enough)):
            yield one.bytes, "regions of it run in tiles"

    def refined(self, step: SearchedStep, front: Front) -> Front:
        return in_tiles(step.traced, front, tiles_to)

    def unreached(self, step: SearchedStep, made: Rewritten) -> Sequence[str]:
        done = (pair for record in made.records for pair in record.rewrites)
        tiles = (rewrite for one, rewrite in done if one.config is Tiles)
        return [n for t in tiles for n in self.describe(t, step.target).notes]


def tiles_to(limit: int) -> tuple[Tiles, ...]:
    """The configuration that takes what runs at one time to a limit."""
    return (Tiles(limit=limit),)


def is_tile_loop(eqn) -> bool:
    """Whether a scan is the loop of a region, or of a head over the vocabulary."""
    return _is_own(eqn) and primitives.is_scan(eqn)


def _is_own(eqn) -> bool:
    """Whether an equation is such a loop, or the `shard_map` of a sum in one."""
    return eqn is not None and SCOPE in _compat.name_stack(eqn)


def _is_region(eqn) -> bool:
    return is_tile_loop(eqn) and VOCABULARY not in _compat.name_stack(eqn)


def _is_loop(eqn, given: InputShardings | None) -> bool:
    """Whether the body of an equation is looked at; `given`: of the list around it."""
    # how the arrays of a `while` are sharded over devices is not known
    is_known = primitives.is_scan(eqn) or given is None
    return primitives.is_loop(eqn) and is_known


@dataclass(frozen=True)
class _Lists:
    """A list of equations and those in its loops, on their way into tiles."""

    asked: Asked
    target: str
    known: Remembered

    def tiled(
        self,
        closed,
        in_scan: bool,
        given: InputShardings | None,
        times: int = 1,
        depth: int = 1,
    ) -> tuple[Any, list[Tile]]:
        """A list of equations and the bodies of its scans, with their tiles."""
        key = "tiled", self.asked, self.target, in_scan, given, times, depth
        run = lambda: self._tiled(closed, in_scan, given, times, depth)
        return self.known.get(key, (closed,), run)

    def _tiled(
        self,
        closed,
        in_scan: bool,
        given: InputShardings | None,
        times: int,
        depth: int,
    ) -> tuple[Any, list[Tile]]:
        is_own = lambda eqn: not has_level(eqn) and not is_tile_loop(eqn)
        closed, tiles = self._bodies(closed, is_own, given, times, depth)
        regions, found = self._regions(closed, in_scan, given), []
        further = depth < _DEPTH and self.asked.n is None
        for _ in range(_ROUNDS):
            chosen = best(regions, self.asked, further)
            if chosen is None:
                break
            found.append(Tile(tuple(regions.graph.eqns), chosen, times))
            regions = regions.tiled(chosen.region)
        if not found:
            return closed, tiles
        ready = self._put_together(regions.graph.closed)
        reached = (one.found.reaches(self.asked.limit) for one in found)
        if further and not all(reached):  # parts hold too much still
            ready, within = self._bodies(ready, _is_region, given, times, depth + 1)
            found += within
        return ready, [*tiles, *found]

    def _regions(self, closed, in_scan: bool, given) -> ListRegions:
        make = lambda: ListRegions(prepared(closed, in_scan), self.target, given)
        return self.known.get(("regions", self.target, in_scan, given), (closed,), make)

    def _put_together(self, closed):
        """The list without what `prepared` did to what is in no region."""
        run = lambda: with_whole_barriers(with_shared_draws(closed))
        return self.known.get("put together", (closed,), run)

    def _bodies(
        self,
        closed,
        picked: Callable[[Any], bool],
        given: InputShardings | None,
        times: int,
        depth: int,
    ):
        """The list with the bodies of some of its scans in tiles."""
        shardings = labelled_shardings(closed, given)
        tiles: list[Tile] = []
        bodies: dict[Any, Any] = {}
        for eqn in filter(picked, jaxprs.split(closed)[0].eqns):
            if not _is_loop(eqn, given):
                continue
            # how often a `while` iterates nobody knows: that of a segment's layers,
            # which runs in one of so many iterations as it has itself, once on average
            count = times * eqn.params.get("length", 1)
            how = True, shardings.body(eqn), count, depth
            body, found = self.tiled(jaxprs.bodies(eqn)[0], *how)
            tiles += found
            if found:
                bodies[id(eqn)] = body

        def rule(eqn, args: list) -> list[Any] | None:
            if id(eqn) not in bodies:
                return None
            _, *condition = jaxprs.bodies(eqn)
            return jaxprs.rebind(eqn, args, [bodies[id(eqn)], *condition])

        if not bodies:
            return closed, tiles
        # which scans they are the bodies of, another limit may say otherwise
        key, of = ("with bodies", *bodies), (closed, *bodies.values())
        return self.known.get(key, of, lambda: jaxprs.rewritten(closed, rule)), tiles
