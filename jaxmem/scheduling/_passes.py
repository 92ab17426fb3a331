"""The passes in order, over a step and over what it holds inside."""

import collections
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxmem import _compat, _jaxpr
from jaxmem.ir.backward import is_transposed
from jaxmem.ir.costs import fused_only
from jaxmem.ir.flatten import flatten
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.scans import is_var, xs_of, ys_of
from jaxmem.ir.shard_maps import aliases_inside, whole_step
from jaxmem.scheduling._choice import NO_CHOICE, Choice, price_at
from jaxmem.scheduling.order.planned import reordered, repeat
from jaxmem.scheduling.order.shrink_first import shrink_first
from jaxmem.scheduling.order.updates import in_order
from jaxmem.scheduling.placement.carried import carried
from jaxmem.scheduling.placement.casts import cast_inside
from jaxmem.scheduling.placement.constants import constants_inside
from jaxmem.scheduling.recompute.first_layers import remake_part
from jaxmem.scheduling.recompute.pairs import Pair, pairs
from jaxmem.scheduling.recompute.residuals import remake, remakes, remakes_by_names
from jaxmem.scheduling.recompute.segments import segmented
from jaxmem.scheduling.recompute.segments_rewrite import remake_segments
from jaxmem.scheduling.recompute.unrolled import compute_again
from jaxmem.scheduling.release.after_scan import HINT
from jaxmem.scheduling.release.analysis import Stack, releases
from jaxmem.scheduling.release.rewrite import release
from jaxmem.scheduling.release.two_pass import blocked_scans, two_pass

Aliases = Mapping[int, int]  # position of an output -> of the input in its memory


@dataclass(frozen=True)
class Rewritten:
    """A jaxpr after the passes, and what they did.

    Attributes:
      jaxpr: closed; computes what the original does.
      stacks: the stacked outputs of its backward scans, released or not.
      residuals: (aval, what makes a layer of it, in words what it is made of, 1) of the
        stacks that forward scans no more make; with -1 of those in their place.
      again: (equation, how often) of what is computed a second time and costs.
      pairs: its pairs of scans as they are before anything is done again.
      lists: its lists of equations that may hold both passes, before the same.
      unordered: the jaxpr before its operations were put in order.
      offloaded: bytes of residuals that wait in the host's memory.
      waits: whether products wait for others (`shrink_first`).
      levels: the lists of equations, one inside another, before their operations were
        put in order, with the aliases of each.
      flat: the jaxpr before all passes, its calls written out.
    """

    jaxpr: Any
    stacks: tuple[Stack, ...] = ()
    residuals: tuple[tuple[Any, Any, str, int], ...] = ()
    again: tuple[tuple[Any, int], ...] = ()
    pairs: tuple[Pair, ...] = ()
    lists: tuple[Any, ...] = ()
    unordered: Any = None
    offloaded: int = 0
    waits: bool = False
    levels: tuple[tuple[Any, Aliases], ...] = ()
    flat: Any = None


def rewrite(
    closed, aliases: Aliases, clip: str | None = None, choice: Choice = NO_CHOICE
) -> Rewritten:
    """The step with every update that can be moved in the backward pass."""
    if choice.plain:
        return Rewritten(closed, flat=closed)
    closed = flatten(closed)
    eqn = whole_step(closed)
    if eqn is None:
        found = _level(closed, aliases, clip, choice)
        return replace(found, jaxpr=carried(found.jaxpr, aliases), flat=closed)
    pairs = aliases_inside(closed, eqn, aliases)
    return _whole(closed, lambda body: rewrite(body, pairs, clip, choice))


def _whole(closed, rewrites: Callable[[Any], Rewritten]) -> Rewritten:
    """A step that is one `shard_map`: all is done to what one device does."""
    inner: list[Rewritten] = []
    opened = _with_shards(closed, rewrites, inner)
    found = replace(inner[0], flat=closed)
    if found.unordered is None:
        return replace(found, jaxpr=opened)
    before = replace(found, jaxpr=found.unordered)
    unordered = _with_shards(closed, lambda _: before, [])
    return replace(found, jaxpr=opened, unordered=unordered)


def _with_shards(closed, rewrites: Callable[[Any], Rewritten], inner: list[Rewritten]):
    """The jaxpr with other bodies in its `shard_map`s."""

    def rule(eqn, args: list) -> list[Any] | None:
        if eqn.primitive.name != "shard_map":
            return None
        return _shard_map(eqn, args, rewrites, inner)

    return _jaxpr.retrace(closed, lambda args: _jaxpr.evaluate(closed, args, rule))


def _shard_map(eqn, args: list, rewrites, inner: list[Rewritten]) -> list[Any]:
    def shards(args: list) -> list[Any]:
        found = rewrites(_compat.ClosedJaxpr(_jaxpr.bodies(eqn)[0], ()))
        inner.append(found)
        return _jaxpr.evaluate(found.jaxpr, args)

    return _compat.shard_map_again(eqn, shards, args)


def _level(
    closed, aliases: Aliases, clip: str | None, choice: Choice, loop=None
) -> Rewritten:
    """One list of equations, the body of `loop`; then the bodies of the scans in it."""
    closed = constants_inside(cast_inside(closed))
    found = tuple(pairs(closed))
    closed, remade = _remade(closed, choice)
    lists, cut = [], []
    if loop is None or not is_transposed(loop):  # else its forward pass is elsewhere
        lists = [closed]
        closed, cut = _again_in_list(closed, choice)
    closed, stacks = _release_all(closed, aliases)
    if clip == "two_pass":
        closed, stacks = _twice(closed, aliases, stacks)
        stacks = [replace(s, why=s.why.replace(HINT, "")) for s in stacks]
    unordered = closed
    if choice.sequence and loop is None:
        closed, repeated = repeat(closed, aliases, choice.sequence, choice.machine)
        cut += repeated
    elif choice.order and loop is None:
        closed = reordered(closed, aliases, choice.machine)
    else:
        closed = in_order(closed, aliases)
    before, inner = closed, []
    closed = shrink_first(closed) if choice.waits else closed
    waits = closed is not before
    closed = _inside(closed, aliases, clip, choice, inner)
    residuals = [made for plan in remade for made in plan.described()]
    again = [x for plan in remade for x in plan.repeated]
    again += [(e, 1) for e in cut]
    return Rewritten(
        closed,
        tuple([*stacks, *(s for r in inner for s in r.stacks)]),
        tuple([*residuals, *(x for r in inner for x in r.residuals)]),
        tuple([*again, *(x for r in inner for x in r.again)]),
        tuple([*found, *(x for r in inner for x in r.pairs)]),
        tuple([*lists, *(x for r in inner for x in r.lists)]),
        unordered,
        sum(plan.offloaded for plan in remade) + sum(r.offloaded for r in inner),
        waits or any(r.waits for r in inner),
        tuple([(unordered, aliases), *(x for r in inner for x in r.levels)]),
    )


def _remade(closed, choice: Choice) -> tuple[Any, list]:
    """What is worth its price made again, in all layers and then in the first ones."""
    price = price_at(choice.rate, choice.machine)
    plans = partial(remakes, price=price, offload=choice.offload)
    if choice.named:
        plans = partial(remakes_by_names, price=price)
    ways: list[tuple[Callable, Callable]] = [(plans, remake)]
    if choice.segments:
        plans = partial(segmented, price=price, sizes=choice.segments)
        ways.insert(0, (plans, remake_segments))
    if choice.more is not None:
        price = price_at(choice.more, choice.machine)
        ways.append((partial(remakes, price=price, part=choice.part), remake_part))
    done = []
    for plans, apply in ways:
        closed, found = _until_done(closed, plans, apply)
        done += found
    return closed, done


def _again_in_list(closed, choice: Choice) -> tuple[Any, list[Any]]:
    """The same outside scans; (jaxpr, equations that cost and are done again)."""
    if choice.rate is None or not choice.lists:
        return closed, []
    closed, done = compute_again(closed, price_at(choice.rate, choice.machine))
    if done is None:
        return closed, []
    pair, found = done
    eqns = [pair.body.eqns[i] for i in found.again]
    return closed, [e for e in eqns if fused_only(e) is None]


def _until_done(closed, plans: Callable, apply: Callable) -> tuple[Any, list]:
    done = []
    while (plan := next(iter(plans(closed)), None)) is not None:
        closed = _compat.without_dead_code(apply(closed, plan))
        done.append(plan)
    return closed, done


def _release_all(closed, aliases: Aliases) -> tuple[Any, list[Stack]]:
    """Everything that can be released, and what became of every stacked gradient."""

    def paying(closed):
        return (p for p in releases(closed, _pairs(closed, aliases)) if p.moved)

    closed, done = _until_done(closed, paying, release)
    stacks = [s for plan in done for s in plan.stacks if s.released]
    for plan in releases(closed, _pairs(closed, aliases)):
        if _is_backward(closed, plan.scan):
            stacks += plan.stacks
    return closed, stacks


def _is_backward(closed, scan: int) -> bool:
    """Whether a scan reads what another has stacked: residuals."""
    graph = JaxprGraph(closed)
    scans = (e for e in graph.eqns if e.primitive.name == "scan")
    stacked = {v for eqn in scans for v in ys_of(eqn)}
    return any(v in stacked for v in xs_of(graph.eqns[scan]) if is_var(v))


PASSES = 3  # a trust ratio with a safe norm needs two before the one that updates


def _twice(closed, aliases: Aliases, stacks: list[Stack]) -> tuple[Any, list[Stack]]:
    """The scans that are held up done again, where that releases more."""
    tried, before = closed, stacks
    for _ in range(PASSES - 1):
        blocked = blocked_scans(tried)
        if not blocked:
            break
        tried, found = _release_all(two_pass(tried, blocked[0]), aliases)
        if _kept(found) < _kept(stacks):
            if not _kept(found):  # first passes have the same stacks: count them once
                found = [replace(s, released=True, why="") for s in before]
            closed, stacks = tried, found
    return closed, stacks


def _kept(stacks: list[Stack]) -> int:
    return sum(_jaxpr.elements(s.var.aval.shape) for s in stacks if not s.released)


def _pairs(closed, aliases: Aliases) -> dict[Any, Any]:
    jaxpr = _jaxpr.split(closed)[0]
    return {
        jaxpr.outvars[o]: jaxpr.invars[i]
        for o, i in aliases.items()
        if is_var(jaxpr.outvars[o])
    }


def _inside(
    closed, aliases: Aliases, clip: str | None, choice: Choice, inner: list[Rewritten]
):
    """The same for what lies in outer scans (micro-batches) and in `shard_map`."""
    graph = JaxprGraph(closed)

    def rule(eqn, args: list):
        if not _is_opened(eqn):
            return None
        if eqn.primitive.name == "scan":
            n_consts, n_carry = _compat.scan_counts(eqn)
            aliases = {k: n_consts + k for k in range(n_carry)}
            found = _level(eqn.params["jaxpr"], aliases, clip, choice, eqn)
            inner.append(found)
            return _jaxpr.rebind(eqn, args, [found.jaxpr])
        return _shard_map(eqn, args, partial(shards, eqn), inner)

    def shards(eqn, body) -> Rewritten:
        body = flatten(body)
        own = by_shape(body, _given_up(graph, eqn, aliases))
        return _level(body, own, clip, choice, eqn)

    if not any(map(_is_opened, graph.eqns)):
        return closed
    return _jaxpr.retrace(closed, lambda args: _jaxpr.evaluate(closed, args, rule))


def _is_opened(eqn) -> bool:
    """Whether there may be something to do inside: scans, or both passes."""
    if eqn.primitive.name not in ("scan", "shard_map"):
        return False
    inside = [e for body in _jaxpr.bodies(eqn) for e in _jaxpr.walk(body)]
    both = not is_transposed(eqn) and any(map(is_transposed, inside))
    return both or any(e.primitive.name == "scan" for e in inside)


def _given_up(graph: JaxprGraph, eqn, aliases: Aliases) -> list[int]:
    """Positions of the inputs of an equation that nobody else reads or keeps."""
    donated = {graph.arguments[i] for i in aliases.values()}

    def is_last(v) -> bool:
        own = is_var(v) and (v in donated or v in graph.maker)
        return own and v not in graph.outputs and len(graph.users[v]) == 1

    return [k for k, v in enumerate(eqn.invars) if is_last(v)]


def by_shape(closed, inputs: Iterable[int]) -> Aliases:
    """Output -> input in whose memory it will be: the first of its kind, as in jit."""
    free: dict[Any, collections.deque[int]] = collections.defaultdict(collections.deque)
    for i in inputs:
        aval = closed.in_avals[i]
        free[aval.shape, aval.dtype].append(i)
    found = {}
    for o, aval in enumerate(closed.out_avals):
        if queue := free.get((aval.shape, aval.dtype)):
            found[o] = queue.popleft()
    return found
