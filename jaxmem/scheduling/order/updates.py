"""Unrolled layers: each is updated right after its gradient.

A compiler that is free to may put all weight gradients, or all updates, at the end of
the backward pass, and keeps all of them until then. Here a barrier after the update of
a parameter takes the updated state and the cotangent that flows on.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxmem.ir import jaxprs
from jaxmem.ir.graph import JaxprGraph, Values
from jaxmem.ir.primitives import ELEMENTWISE
from jaxmem.ir.scans import LARGE, barrier, is_var, size_of

_UPDATE = ELEMENTWISE | frozenset(
    "broadcast_in_dim reshape sharding_constraint squeeze transpose".split()
)


@dataclass
class Update:
    """The operations that turn a gradient into new parameters and moments."""

    eqns: set[int]  # their positions
    outs: list[Any]  # the new state
    apart: list[Any]  # what of it has memory of its own
    leaves: set[Any]  # the gradients they start from
    # position of the last equation that makes a gradient or reads the old state
    own: int
    number: int  # the same of what a number that they need is made of; -1 for none

    @property
    def ready(self) -> int:
        return max(self.own, self.number)


def in_order(closed, aliases: Mapping[int, int]):
    """The jaxpr with a barrier after each large update that more gradients follow."""
    graph = JaxprGraph(closed)
    updates = filter(_is_in_place, updates_of(graph, aliases))
    updates = sorted(updates, key=lambda u: u.ready)
    ties = {u.ready: (u, tie) for u, tie in _ties(graph, updates, aliases)}
    if not ties:
        return closed

    def run(args: list) -> list:
        values = Values(graph, graph.inputs(args))
        for i, (update, tie) in sorted(ties.items()):
            values.evaluate_before(i + 1)
            for k in sorted(update.eqns):
                values.evaluate(k)
            held = [*update.outs, tie]
            through = barrier([values.env[v] for v in held])
            values.env.update(zip(held, through, strict=True))
        return values.all_outputs()

    return jaxprs.retrace(closed, run)


def updates_of(graph: JaxprGraph, aliases: Mapping[int, int]) -> list[Update]:
    """One for each set of outputs that are made of the same gradient."""
    found: list[Update] = []
    made_by = functools.cache(partial(_made_by, graph))  # a number is read by them all
    for o, out in enumerate(graph.outvars):
        new = _update(graph, out, o in aliases, made_by)
        if new is None:
            continue
        for old in [u for u in found if u.leaves & new.leaves]:
            found.remove(old)
            new = _both(old, new)
        found.append(new)
    return found


def _is_in_place(update: Update) -> bool:
    """Whether it frees the gradients' memory: what it makes has none of its own."""
    # State that is not donated has memory of its own from the beginning, in which the
    # gradient can lie as long as the update waits: then nothing is put in order.
    some = len(update.apart) < len(update.outs)
    return some and _bytes(update.apart) < _bytes(update.leaves)


def _both(a: Update, b: Update) -> Update:
    return Update(
        a.eqns | b.eqns,
        a.outs + b.outs,
        a.apart + b.apart,
        a.leaves | b.leaves,
        max(a.own, b.own),
        max(a.number, b.number),
    )


def _bytes(variables: Iterable[Any]) -> int:
    return sum(map(size_of, variables))


def _update(
    graph: JaxprGraph, out, is_aliased: bool, made_by: Callable[[Any], int]
) -> Update | None:
    if not is_var(out):
        return None
    eqns, leaves, todo = set(), set(), [out]
    while todo:
        v = todo.pop()
        i = graph.maker.get(v)
        moves = i is not None and graph.eqns[i].primitive.name in _UPDATE
        if i is not None and moves and not graph.is_given(v):
            if i not in eqns:
                eqns.add(i)
                todo += filter(is_var, graph.eqns[i].invars)
        else:
            leaves.add(v)
    arrays = {v for v in leaves if v.aval.ndim}
    gradients = {v for v in arrays if not graph.is_given(v)}
    if not eqns or not gradients:
        return None
    # in place means after the last reader of the old state: the backward pass itself
    old = [u for v in arrays - gradients for u in graph.users.get(v, ())]
    own = max([*(i for i in old if i not in eqns), *map(made_by, gradients)])
    number = max(map(made_by, leaves - arrays), default=-1)
    apart = [] if is_aliased else [out]
    return Update(eqns, [out], apart, gradients, own, number)


def _made_by(graph: JaxprGraph, v) -> int:
    """When a leaf can be there: a number waits for the arrays that it is made of."""
    if v not in graph.maker:
        return -1
    if v.aval.ndim:
        return graph.maker[v]
    cone = graph.cone([v])
    return max((i for i in cone if _reads_arrays(graph.eqns[i])), default=-1)


def _reads_arrays(eqn) -> bool:
    return any(v.aval.ndim for v in eqn.invars)


def _ties(
    graph: JaxprGraph, updates: Sequence[Update], aliases: Mapping[int, int]
) -> Iterator[tuple[Update, Any]]:
    """What the backward pass goes on with after each large update."""
    inside = {i for u in updates for i in u.eqns}
    for update in updates:
        if _bytes(update.outs) < LARGE:
            continue
        rest = _rest(graph, update, updates, aliases) - inside
        for i in sorted(i for i in rest if i > update.ready):
            tie = [v for v in graph.eqns[i].invars if _flows(graph, v, update.ready)]
            if tie:  # of a cotangent and a residual the one made last
                yield update, max(tie, key=lambda v: graph.maker[v])
                break


def _rest(graph: JaxprGraph, update: Update, updates, aliases) -> set[int]:
    """The equations that make the gradients which are not there yet."""
    later = [v for u in updates if u.ready > update.ready for v in u.leaves]
    state = [graph.outvars[o] for o in aliases]
    scans = [v for v in state if is_var(v) and _by_scan(graph, v)]
    return graph.cone([*later, *scans])


def _by_scan(graph: JaxprGraph, v) -> bool:
    return v in graph.maker and graph.eqns[graph.maker[v]].primitive.name == "scan"


def _flows(graph: JaxprGraph, v, now: int) -> bool:
    """Whether a value is there by now, made by the step, and carries a cotangent."""
    made = is_var(v) and v in graph.maker and graph.maker[v] <= now
    return made and v.aval.ndim > 0 and jnp.issubdtype(v.aval.dtype, jnp.inexact)
