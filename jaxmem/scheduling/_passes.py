"""The passes in order, over a step and over what it holds inside."""

import collections
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxmem import _compat, _jaxpr
from jaxmem.scheduling._flatten import flatten
from jaxmem.scheduling._graph import Graph
from jaxmem.scheduling._order import in_order
from jaxmem.scheduling._release import HINT, Stack, releases
from jaxmem.scheduling._release_scan import release
from jaxmem.scheduling._scan_inputs import cast_inside
from jaxmem.scheduling._scan_residuals import remake, remakes
from jaxmem.scheduling._scans import is_var, xs_of, ys_of
from jaxmem.scheduling._two_pass import blocked_scans, two_pass

Aliases = Mapping[int, int]  # position of an output -> of the input in its memory


@dataclass(frozen=True)
class Rewritten:
    """A jaxpr after the passes, and what they did.

    Attributes:
      jaxpr: closed; computes what the original does.
      stacks: the stacked outputs of its backward scans, released or not.
      residuals: (aval, what makes a layer of it, in words what it is made of, 1) of the
        stacks that forward scans no more make; with -1 of those in their place.
    """

    jaxpr: Any
    stacks: tuple[Stack, ...] = ()
    residuals: tuple[tuple[Any, Any, str, int], ...] = ()


def rewrite(closed, aliases: Aliases, clip: str | None = None) -> Rewritten:
    """The step with every update that can be moved in the backward pass."""
    return _level(flatten(closed), aliases, clip)


def _level(closed, aliases: Aliases, clip: str | None) -> Rewritten:
    """One list of equations, then the bodies of the scans in it."""
    closed, remade = _until_done(cast_inside(closed), remakes, remake)
    closed, stacks = _release_all(closed, aliases)
    if clip == "two_pass":
        closed, stacks = _twice(closed, aliases, stacks)
        stacks = [replace(s, why=s.why.replace(HINT, "")) for s in stacks]
    closed = in_order(closed, aliases)
    inner: list[Rewritten] = []
    closed = _inside(closed, clip, inner)
    residuals = [made for plan in remade for made in plan.described()]
    return Rewritten(
        closed,
        tuple([*stacks, *(s for r in inner for s in r.stacks)]),
        tuple([*residuals, *(x for r in inner for x in r.residuals)]),
    )


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
    graph = Graph(closed)
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
    return sum(s.var.aval.size for s in stacks if not s.released)


def _pairs(closed, aliases: Aliases) -> dict[Any, Any]:
    jaxpr = _jaxpr.split(closed)[0]
    return {
        jaxpr.outvars[o]: jaxpr.invars[i]
        for o, i in aliases.items()
        if is_var(jaxpr.outvars[o])
    }


def _inside(closed, clip: str | None, inner: list[Rewritten]):
    """The same for what lies in outer scans (micro-batches) and in `shard_map`."""

    def rule(eqn, args: list):
        if not _holds_scan(eqn):
            return None
        if eqn.primitive.name == "scan":
            n_consts, n_carry = _compat.scan_counts(eqn)
            aliases = {k: n_consts + k for k in range(n_carry)}
            found = _level(eqn.params["jaxpr"], aliases, clip)
            inner.append(found)
            return _jaxpr.rebind(eqn, args, [found.jaxpr])
        return _compat.shard_map_again(eqn, lambda x: shards(eqn, x), args)

    def shards(eqn, args: list) -> list:
        body = _jaxpr.bodies(eqn)[0]
        closed = _jaxpr.retrace(body, lambda x: _jaxpr.evaluate(body, x))
        found = rewrite(closed, by_shape(closed, range(len(args))), clip)
        inner.append(found)
        return _jaxpr.evaluate(found.jaxpr, args)

    if not any(map(_holds_scan, _jaxpr.split(closed)[0].eqns)):
        return closed
    return _jaxpr.retrace(closed, lambda args: _jaxpr.evaluate(closed, args, rule))


def _holds_scan(eqn) -> bool:
    if eqn.primitive.name not in ("scan", "shard_map"):
        return False
    inside = (e for body in _jaxpr.bodies(eqn) for e in _jaxpr.walk(body))
    return any(e.primitive.name == "scan" for e in inside)


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
