"""The pass that runs parts of a step in tiles, where they hold too much at one time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.ir.scans import LOOPS
from jaxmem.scheduling._pass import Level, Pass, has_level
from jaxmem.scheduling.plan.rows import Description
from jaxmem.scheduling.tiling.best import Asked, Found, best
from jaxmem.scheduling.tiling.loop import SCOPE, VOCABULARY, tiled
from jaxmem.scheduling.tiling.masks import with_shared_draws
from jaxmem.scheduling.tiling.prepared import prepared
from jaxmem.scheduling.tiling.regions import RegionGraph
from jaxmem.scheduling.tiling.rows import row_of, whole_ones
from jaxmem.scheduling.tiling.shards import InputSpreads, spreads_in

_ROUNDS = 3  # regions of one list, side by side
_DEPTH = 2  # loops of regions in one another


@dataclass(frozen=True)
class Tiles:
    """How much a list of equations may hold while it runs."""

    name: ClassVar[str] = "tiles"
    # bytes that equations outside of loops, or those of one iteration of a scan, may
    # hold at one time before they run in tiles; None: nothing runs in tiles
    limit: int | None = None
    # how many tiles, whatever they hold; None: as few as will do
    n: int | None = None


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


class TileRegions(Pass[Tiles, TiledLists]):
    """What a list of equations holds at one time, less of it."""

    config = Tiles

    def analyse(self, level: Level, config: Tiles) -> Iterator[TiledLists]:
        # what runs in tiles already is left as it is
        eqns = jaxprs.split(level.jaxpr)[0].eqns
        regions = filter(_is_region, eqns)
        if config.limit is None or _is_own(level.loop) or any(regions):
            return
        in_scan = level.loop is not None and level.loop.primitive.name == "scan"
        asked = Asked(config.limit, config.n, level.target)
        jaxpr, tiles = _tiled_list(level.jaxpr, asked, in_scan, level.spreads)
        if tiles:
            yield TiledLists(jaxpr, tuple(tiles))

    def apply(self, level: Level, rewrite: TiledLists):
        del level
        return rewrite.jaxpr

    def describe(self, rewrite: TiledLists, target: str) -> Description:
        rows = (row_of(t.eqns, t.found, t.times, target) for t in rewrite.tiles)
        notes = (note for t in rewrite.tiles for note in whole_ones(t.eqns, t.found))
        return Description(tiles=tuple(rows), notes=tuple(dict.fromkeys(notes)))


def is_tile_loop(eqn) -> bool:
    """Whether a scan is the loop of a region, or of a head over the vocabulary."""
    return _is_own(eqn) and eqn.primitive.name == "scan"


def _is_own(eqn) -> bool:
    """Whether an equation is such a loop, or the `shard_map` of a sum in one."""
    return eqn is not None and SCOPE in _compat.name_stack(eqn)


def _is_region(eqn) -> bool:
    return is_tile_loop(eqn) and VOCABULARY not in _compat.name_stack(eqn)


def _tiled_list(
    closed,
    config: Asked,
    in_scan: bool,
    given: InputSpreads | None,
    times: int = 1,
    depth: int = 1,
):
    """A list of equations and the bodies of its scans, with their tiles."""
    is_own = lambda eqn: not has_level(eqn) and not is_tile_loop(eqn)
    closed, tiles = _with_tiled_bodies(closed, is_own, config, given, times, depth)
    ready, found = prepared(closed, in_scan), []
    further = depth < _DEPTH and config.n is None
    for _ in range(_ROUNDS):
        graph = RegionGraph(ready, spreads_in(ready, given))
        chosen = best(graph, config, further)
        if chosen is None:
            break
        found.append(Tile(tuple(graph.eqns), chosen, times))
        ready = tiled(graph, chosen.region)
    if not found:
        return closed, tiles
    ready = with_shared_draws(ready)
    reached = (one.found.reaches(config.limit) for one in found)
    if further and not all(reached):  # parts hold too much still
        how = config, given, times, depth + 1
        ready, within = _with_tiled_bodies(ready, _is_region, *how)
        found += within
    return ready, [*tiles, *found]


def _with_tiled_bodies(
    closed,
    picked: Callable[[Any], bool],
    config: Asked,
    given: InputSpreads | None,
    times: int,
    depth: int,
):
    tiles: list[Tile] = []
    spreads = spreads_in(closed, given)

    def rule(eqn, args: list) -> list[Any] | None:
        if eqn.primitive.name not in LOOPS or not picked(eqn):
            return None
        if eqn.primitive.name == "while" and given is not None:
            return None  # how its arrays are spread over devices is not known
        # how often a `while` iterates nobody knows: that of a segment's layers, which
        # runs in one of so many iterations as it has itself, once on the average
        count = times * eqn.params.get("length", 1)
        body, *condition = jaxprs.bodies(eqn)
        inside = spreads.body(eqn)
        body, found = _tiled_list(body, config, True, inside, count, depth)
        if not found:
            return None
        tiles.extend(found)
        return jaxprs.rebind(eqn, args, [body, *condition])

    run = lambda args: jaxprs.evaluate(closed, args, rule)
    return jaxprs.retrace(closed, run), tiles
