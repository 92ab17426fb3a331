"""Bodies whose nested equations are taken apart, however deep, and put together."""

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

from jaxmem import _compat
from jaxmem.ir import branch_parts, jaxprs, map_parts, primitives, scan_parts
from jaxmem.ir.body_parts import is_plain
from jaxmem.ir.flatten import flatten
from jaxmem.ir.fused import fused_only
from jaxmem.ir.graph import JaxprGraph, Values, done_otherwise
from jaxmem.ir.joined import JoinableKind, done_once, put_together
from jaxmem.ir.part_marks import is_part
from jaxmem.ir.same_loops import loops_once
from jaxmem.ir.scans import is_var
from jaxmem.ir.shard_maps import done_inside, inside_of
from jaxmem.ir.types import ClosedJaxpr, JaxprEqn

_KINDS: tuple[JoinableKind, ...] = (
    map_parts.MAPS,
    branch_parts.BRANCHES,
    scan_parts.SCANS,
)


def apart(closed: ClosedJaxpr, wanted: Collection[int]) -> Any:
    """The jaxpr with what makes its outputs at the positions `wanted` taken apart."""
    graph = JaxprGraph(closed)
    return made_apart(closed, graph, [graph.outvars[k] for k in wanted])


def made_apart(closed: ClosedJaxpr, graph: JaxprGraph, wanted: Iterable[Any]) -> Any:
    """The same of variables of the jaxpr's graph."""
    asked = _before_moves(graph, wanted)
    instead = {}
    for i, eqn in enumerate(graph.eqns):
        outs = [k for k in _separable(eqn) if eqn.outvars[k] in asked]
        if outs:
            instead[i] = partial(_taken_apart, eqn, outs)
    return done_otherwise(closed, graph, instead) if instead else closed


def _before_moves(graph: JaxprGraph, atoms: Iterable[Any]) -> set[Any]:
    """The variables from which these are made by operations that cost nothing."""
    todo, found = [v for v in atoms if is_var(v)], set()
    while todo:
        v = todo.pop()
        if v in found:
            continue
        found.add(v)
        if (
            v in graph.maker
            and fused_only(eqn := graph.eqns[graph.maker[v]]) is not None
        ):
            todo += filter(is_var, eqn.invars)
    return found


def _separable(eqn: JaxprEqn) -> list[int]:
    """Positions of the results of an equation that parts of it can make."""
    if _compat.has_side_effects(eqn):
        return []
    plain = [k for k, v in enumerate(eqn.outvars) if is_plain(v)]
    if primitives.is_scan(eqn):
        # a carry is made of all iterations before: no part of one makes it
        ends = _compat.scan_counts(eqn)[1]
        return [k for k in plain if k >= ends]
    if primitives.is_branch(eqn):
        return plain if branch_parts.can_be_taken_apart(eqn) else []
    if primitives.is_shard_map(eqn):
        return plain if map_parts.can_be_taken_apart(eqn) else []
    return []


def _taken_apart(eqn: JaxprEqn, wanted: list[int], values: Values) -> list[Any]:
    args = [values.read(v) for v in eqn.invars]
    if primitives.is_shard_map(eqn):
        # its calls are written out first, so that parts are single operations
        body = inside_of(eqn, lambda closed: apart(flatten(closed), wanted))
        return map_parts.taken_apart(eqn, body, args)
    bodies = [apart(body, wanted) for body in jaxprs.bodies(eqn)]
    if primitives.is_branch(eqn):
        return branch_parts.taken_apart(eqn, bodies, args, wanted)
    return scan_parts.taken_apart(eqn, bodies[0], args, wanted)


def together(closed: ClosedJaxpr) -> Any:
    """The jaxpr with its parts, and those inside of its loops and branches, joined."""
    given = closed
    for kind in _KINDS:
        closed = put_together(closed, kind)
    # a loop inside that was taken apart may be there twice, for carries and stacks
    closed = loops_once(closed)
    graph = JaxprGraph(closed)
    instead = {}
    for i, eqn in enumerate(graph.eqns):
        old = jaxprs.bodies(eqn)
        if primitives.is_shard_map(eqn) and any(map(is_part, jaxprs.walk(old[0]))):
            instead[i] = partial(_with_shards, eqn)
        if not (primitives.is_loop(eqn) or primitives.is_branch(eqn)):
            continue
        new = list(map(together, old))
        if any(a is not b for a, b in zip(old, new, strict=True)):
            instead[i] = partial(_with_bodies, eqn, new)
    if instead:
        closed = done_otherwise(closed, graph, instead)
    # what read two results that are one now may be done once, too
    return closed if closed is given else done_once(closed)


def _with_shards(eqn: JaxprEqn, values: Values) -> list[Any]:
    return done_inside(eqn, [values.read(v) for v in eqn.invars], together)


def _with_bodies(eqn: JaxprEqn, bodies: list[Any], values: Values) -> list[Any]:
    outs = jaxprs.rebind(eqn, [values.read(v) for v in eqn.invars], bodies)
    return branch_parts.as_one(bodies, outs) if primitives.is_branch(eqn) else outs
