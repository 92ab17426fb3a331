"""The passes in order, over a step and over the loops in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.flatten import flatten
from jaxmem.ir.graph import Aliases, JaxprGraph, by_shape
from jaxmem.ir.map_pairs import DoneInHalves, MapHalves, MapPair, map_pairs
from jaxmem.ir.scans import carried_aliases, is_var
from jaxmem.ir.shard_labels import labelled_shardings
from jaxmem.ir.shard_maps import aliases_inside, done_inside, inside_of, whole_step
from jaxmem.ir.shards import InputShardings, of_shardings
from jaxmem.scheduling._choice import NO_CHOICE, Choice
from jaxmem.scheduling._pass import Level, Pass, has_level
from jaxmem.scheduling._remembered import Remembered
from jaxmem.scheduling._rewritten import Record, Rewritten, name_of
from jaxmem.scheduling._searched import Searched
from jaxmem.scheduling.moves.inside import CastInside, ConstantsInside
from jaxmem.scheduling.moves.passed_on import PassOnSlices
from jaxmem.scheduling.order.order_operations import OrderOperations
from jaxmem.scheduling.order.shrink_first import ProductsThatShrinkFirst
from jaxmem.scheduling.ragged.in_blocks import RaggedInBlocks
from jaxmem.scheduling.recompute.barriers import RecomputeBehindBarriers
from jaxmem.scheduling.recompute.branches import RecomputeInBranches
from jaxmem.scheduling.recompute.first_layers import RecomputeFirstLayers
from jaxmem.scheduling.recompute.nested import PutNestedTogether, TakeNestedApart
from jaxmem.scheduling.recompute.recompute_residuals import RecomputeResiduals
from jaxmem.scheduling.recompute.recompute_segments import RecomputeSegments
from jaxmem.scheduling.recompute.recompute_unrolled import RecomputeUnrolled
from jaxmem.scheduling.release.released import GradientRelease, ReleaseGradients
from jaxmem.scheduling.release.write_back import carried
from jaxmem.scheduling.row_chunks.update import UpdateInRows
from jaxmem.scheduling.rows.update import UpdateTouchedRows
from jaxmem.scheduling.sums.two_steps import SumInTwoSteps
from jaxmem.scheduling.tiling.batch_loop import is_batch_loop
from jaxmem.scheduling.tiling.run_in_micro_batches import RunInMicroBatches
from jaxmem.scheduling.tiling.tiles import TileRegions
from jaxmem.scheduling.tiling.vocabulary_tiles import TileVocabulary

PASSES: tuple[Pass, ...] = (
    PassOnSlices(),
    RunInMicroBatches(),
    CastInside(),
    ConstantsInside(),
    TakeNestedApart(),
    RecomputeSegments(),
    RecomputeFirstLayers(),
    RecomputeResiduals(),
    RecomputeInBranches(),
    RecomputeUnrolled(),
    RecomputeBehindBarriers(),
    PutNestedTogether(),
    TileVocabulary(),
    TileRegions(),
    UpdateTouchedRows(),
    ReleaseGradients(),
    UpdateInRows(),
    RaggedInBlocks(),
    OrderOperations(),
    ProductsThatShrinkFirst(),
    SumInTwoSteps(),
)
CONFIGS: dict[str, type] = {one.config.name: one.config for one in PASSES}


def searched() -> list[Searched]:
    """The passes that a search asks, in its order: what changes least comes first."""
    return [one for one in reversed(PASSES) if isinstance(one, Searched)]


def rewrite(
    closed,
    aliases: Aliases,
    clip: str | None = None,
    choice: Choice = NO_CHOICE,
    shardings: Sequence[Any] = (),
    known: Remembered | None = None,
    ordered: bool = True,
) -> Rewritten:
    """The step with every update that can be moved in the backward pass.

    `shardings`: of its arguments, None for one that is not known; or none at all.
    `known`: what was found under other choices of the same step. `ordered`: whether
    operations are put in order; if not, the result is to be looked at, and not run.
    """
    if choice.unchanged:
        return Rewritten(closed, closed)
    if clip == "two_pass":
        choice = choice.having(GradientRelease(two_pass=True))
    known = Remembered() if known is None else known
    written_out = _flat(closed, known)
    passes = [one for one in PASSES if ordered or not one.orders]
    run = _Passes(choice, passes, known, ordered)
    found = _step(written_out, aliases, run, of_shardings(written_out, shardings))
    return replace(found, written_out=written_out)


@dataclass(frozen=True)
class _Passes:
    """The passes that are run, and what is known of their results."""

    choice: Choice
    passes: Sequence[Pass]
    known: Remembered
    ordered: bool  # whether those that put operations in order are among them


def _flat(closed, known: Remembered) -> Any:
    # the body of a `shard_map` is closed anew whenever it is asked for
    of = closed if jaxprs.split(closed)[1] else jaxprs.split(closed)[0]
    return known.get("flat", (of,), lambda: flatten(closed))


def _step(
    closed,
    aliases: Aliases,
    run: _Passes,
    shardings: InputShardings | None = None,
    maps: tuple[Any, ...] = (),
) -> Rewritten:
    eqn = whole_step(closed)
    if eqn is not None:
        own = aliases_inside(closed, eqn, aliases)
        return _sharded_step(closed, own, run, (*maps, eqn))
    choice, known = run.choice, run.known
    how = {"compared": choice.compared, "shardings": shardings, "known": known}
    how["maps"] = maps
    level = known.get(
        ("level", choice.target, choice.compared, shardings, tuple(aliases.items())),
        (closed,),
        lambda: Level(closed, aliases, choice.target, **how),
    )
    jaxpr, records = _run_passes(level, run)
    jaxpr = carried(jaxpr, aliases) if run.ordered else jaxpr
    return Rewritten(jaxpr, closed, records, choice.target)


def _sharded_step(
    closed, aliases: Aliases, run: _Passes, maps: tuple[Any, ...]
) -> Rewritten:
    """A step that is one `shard_map`: all is done to what one device does."""
    found: list[Rewritten] = []

    def rewritten(body):
        found.append(_step(_flat(body, run.known), aliases, run, maps=maps))
        return found[0].jaxpr

    jaxpr = _with_shards(closed, rewritten)
    inner = found[0].whole
    whole = lambda body: _with_shards(closed, lambda _: inner(body))
    return replace(found[0], jaxpr=jaxpr, whole=whole)


def _with_shards(closed, rewritten: Callable[[Any], Any]):

    def rule(eqn, args: list) -> list[Any] | None:
        if not primitives.is_shard_map(eqn):
            return None
        return done_inside(eqn, args, rewritten)

    return jaxprs.rewritten(closed, rule)


def _run_passes(level: Level, run: _Passes) -> tuple[Any, tuple[Record, ...]]:
    """All passes over one list of equations; then over the loops in it."""
    entered: dict[type, Level] = {}
    rewrites: list[tuple[Pass, Any]] = []
    notes: list[str] = []
    for one in run.passes:
        config = run.choice.get(one.config)
        entered[one.config] = level
        if name_of(one) in run.choice.without:
            continue
        make = partial(_run, one, level, config)
        level, done, left = run.known.get((one.config, config), (level,), make)
        rewrites += ((one, rewrite) for rewrite in done)
        notes += left
    first = (entered[one.config] for one in run.passes if one.orders)
    unordered = next(first, level)
    record = Record(entered, tuple(rewrites), tuple(notes), unordered)
    jaxpr, inner = _LevelBodies(level, run).rewrite()
    return jaxpr, (record, *inner)


def _run(one: Pass, level: Level, config) -> tuple[Level, list[Any], list[str]]:
    """A level after a pass, what was done to it, and what was left and why."""
    done: list[Any] = []
    while (rewrite := next(iter(one.analyse(level, config)), None)) is not None:
        jaxpr = one.apply(level, rewrite)
        done.append(rewrite)
        if one.repeats:
            jaxpr = _compat.without_dead_code(jaxpr)
        level = replace(level, jaxpr=jaxpr)
        if not one.repeats:
            break
    return level, done, list(one.left(level, config))


class _LevelBodies:
    """All passes over what lies in loops, branches and `shard_map`s of a level."""

    def __init__(self, level: Level, run: _Passes):
        self.level, self.run, self.graph = level, run, JaxprGraph(level.jaxpr)
        entered = list(filter(has_level, self.graph.eqns))
        self.maps = [e for e in entered if primitives.is_shard_map(e)]
        self.others = [e for e in entered if not primitives.is_shard_map(e)]
        self.shardings = labelled_shardings(
            level.jaxpr, level.shardings if entered else None
        )
        self.records: list[Record] = []
        self.made: dict[int, list[Any]] = {}  # id of a loop or branch -> its bodies
        self.in_halves: list[MapHalves] = []
        self.halves: dict[int, DoneInHalves] = {}  # by id of each of the two maps

    def rewrite(self) -> tuple[Any, list[Record]]:
        """The level's jaxpr with these bodies, and what was done to them."""
        bodies = [self._bodies(eqn) for eqn in self.others]
        pairs = zip(self.others, bodies, strict=True)
        self.made = {id(eqn): new for eqn, new in pairs}
        self._take_halves()
        if self.maps:
            return self._rewritten(), self.records
        old, new = map(_chained, (map(jaxprs.bodies, self.others), bodies))
        if all(a is b for a, b in zip(old, new, strict=True)):
            return self.level.jaxpr, self.records
        jaxpr = self.run.known.get("inside", (self.level, *new), self._rewritten)
        return jaxpr, self.records

    def _rewritten(self):
        for halves in self.in_halves:
            both, pair = DoneInHalves(halves), halves.pair
            self.halves |= {id(pair.forward): both, id(pair.backward): both}
        run = lambda args: jaxprs.evaluate(self.level.jaxpr, args, self._rule)
        return jaxprs.retrace(self.level.jaxpr, run)

    def _rule(self, eqn, args: list) -> list[Any] | None:
        if id(eqn) in self.halves:
            return self.halves[id(eqn)](eqn, args)
        if any(eqn is one for one in self.maps):
            return done_inside(eqn, args, partial(self._shards, eqn))
        new = self.made.get(id(eqn))
        return None if new is None else jaxprs.rebind(eqn, args, new)

    def _body(self, eqn, aliases: Aliases, body):
        level, inside = self.level, self.shardings.body(eqn)
        about = {"jaxpr": body, "aliases": aliases, "loop": eqn, "shardings": inside}
        if primitives.is_shard_map(eqn):
            about["maps"] = (*level.maps, eqn)
        key = "inside", level.target, level.compared, inside, tuple(aliases.items())
        make = lambda: replace(level, **about)
        inner = self.run.known.get(key, (eqn, body), make)
        jaxpr, found = _run_passes(inner, self.run)
        n = eqn.params["length"] if is_batch_loop(eqn) else 1
        self.records += (replace(record, times=n * record.times) for record in found)
        return jaxpr

    def _bodies(self, eqn) -> list[Any]:
        own = jaxprs.bodies(eqn)
        if primitives.is_branch(eqn):
            return [self._body(eqn, {}, body) for body in own]
        # of a `while` the first: the other says whether it goes on
        return [self._body(eqn, carried_aliases(eqn), own[0]), *own[1:]]

    def _shards(self, eqn, body):
        body = _flat(body, self.run.known)
        own = by_shape(body, _given_up(self.graph, eqn, self.level.aliases))
        return self._body(eqn, own, body)

    def _take_halves(self) -> None:
        """Of `shard_map`s that were differentiated outside, those that leave less."""
        known = self.run.known
        pairs = known.get("map pairs", (self.level,), lambda: _map_pairs(self.graph))
        for pair in pairs:
            before = len(self.records)
            halves = _halves(pair, partial(self._body, pair.joined, {}), known)
            if halves is None:
                del self.records[before:]
            else:
                self.in_halves.append(halves)


def _map_pairs(graph: JaxprGraph) -> list[MapPair]:
    """The `shard_map`s that were differentiated outside of them."""
    return [pair for pair in map_pairs(graph) if has_level(pair.backward)]


def _halves(pair: MapPair, rewritten: Callable, known: Remembered) -> MapHalves | None:
    """The two `shard_map`s after the passes over both.

    None if they leave no less, or if the first one would need what comes after it.
    """
    closed = inside_of(pair.joined, lambda body: rewritten(_flat(body, known)))
    if jaxprs.split(closed)[1]:  # of the trace of the map: elsewhere they mean nothing
        return None
    halves = MapHalves(pair, JaxprGraph(closed))
    return halves if halves.are_apart and halves.bytes < pair.bytes else None


def _chained(lists) -> list[Any]:
    return [one for each in lists for one in each]


def _given_up(graph: JaxprGraph, eqn, aliases: Aliases) -> list[int]:
    """Positions of the inputs of an equation that nothing else reads or keeps."""
    donated = {graph.arguments[i] for i in aliases.values()}

    def is_last(v) -> bool:
        own = is_var(v) and (v in donated or v in graph.maker)
        return own and v not in graph.outputs and len(graph.users[v]) == 1

    return [k for k, v in enumerate(eqn.invars) if is_last(v)]
