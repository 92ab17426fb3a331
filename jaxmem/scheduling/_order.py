"""Unrolled layers: each is updated right after its gradient.

A compiler that is free to may put all weight gradients, or all updates, at the end of
the backward pass, and keeps all of them until then. Here the update of a parameter is
followed by a barrier that the rest of the backward pass has to go through: it takes the
updated state and the cotangent that flows on.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxmem import _compat, _jaxpr
from jaxmem.scheduling._graph import Graph
from jaxmem.scheduling._layer_axis import ELEMENTWISE
from jaxmem.scheduling._scans import is_var

LARGE = 2**20  # bytes; a barrier for less costs fusions and gains nothing

_UPDATE = ELEMENTWISE | {"broadcast_in_dim", "reshape", "squeeze", "transpose"}


@dataclass
class Update:
    """The operations that turn a gradient into new parameters and moments.

    Attributes:
      eqns: their positions.
      outs: the new state.
      leaves: what they start from: gradients, old state, numbers.
      ready: position of the last equation before they can be done.
    """

    eqns: set[int]
    outs: list[Any]
    leaves: set[Any]
    ready: int


def in_order(closed, aliases: Mapping[int, int]):
    """The jaxpr with a barrier after each large update that more gradients follow."""
    graph = Graph(closed)
    updates = sorted(_updates(graph, aliases), key=lambda u: u.ready)
    ties = {u.ready: (u, tie) for u, tie in _ties(graph, updates)}
    if not ties:
        return closed

    def run(args: list) -> list:
        env, done = graph.inputs(args), set()

        def evaluate(i: int) -> None:
            if i in done:
                return
            done.add(i)
            values = []
            for v in graph.eqns[i].invars:
                if is_var(v) and v not in env:
                    evaluate(graph.maker[v])
                values.append(env[v] if is_var(v) else v.val)
            outs = _compat.bind(graph.eqns[i], values)
            env.update(zip(graph.eqns[i].outvars, outs, strict=True))

        for i in range(len(graph.eqns)):
            evaluate(i)
            if i in ties:
                update, tie = ties[i]
                for k in sorted(update.eqns):
                    evaluate(k)
                held = [*update.outs, *tie]
                env.update(zip(held, lax.optimization_barrier([env[v] for v in held])))
        return [env[v] if is_var(v) else v.val for v in graph.outvars]

    return _jaxpr.retrace(closed, run)


def _bytes(v) -> int:
    return v.aval.size * v.aval.dtype.itemsize


def _updates(graph: Graph, aliases: Mapping[int, int]) -> Iterator[Update]:
    """One for each set of state outputs that are made of the same gradient."""
    found: list[Update] = []
    for o in aliases:
        v = graph.outvars[o]
        if is_var(v) and v in graph.maker and _bytes(v) >= LARGE:
            new = _update(graph, v)
            if new is None:
                continue
            for old in [u for u in found if u.leaves & new.leaves]:
                found.remove(old)
                new = Update(
                    old.eqns | new.eqns,
                    old.outs + new.outs,
                    old.leaves | new.leaves,
                    max(old.ready, new.ready),
                )
            found.append(new)
    yield from found


def _update(graph: Graph, out) -> Update | None:
    eqns, leaves, todo = set(), set(), [out]
    while todo:
        v = todo.pop()
        i = graph.maker.get(v)
        if i is not None and graph.eqns[i].primitive.name in _UPDATE:
            if i not in eqns:
                eqns.add(i)
                todo += filter(is_var, graph.eqns[i].invars)
        else:
            leaves.add(v)
    gradients = {v for v in leaves if v in graph.maker and v.aval.ndim}
    if not eqns or not gradients:
        return None
    return Update(eqns, [out], gradients, max(graph.maker[v] for v in gradients))


def _ties(graph: Graph, updates: list[Update]) -> Iterator[tuple[Update, list[Any]]]:
    """What the backward pass goes on with after each update but the last."""
    inside = {i for u in updates for i in u.eqns}
    for k, update in enumerate(updates[:-1]):
        rest = _needed(graph, updates[k + 1 :])
        if updates[k + 1].ready == update.ready:
            continue
        for i in sorted(rest - inside):
            if i <= update.ready:
                continue
            tie = [v for v in graph.eqns[i].invars if _flows(graph, v, update.ready)]
            if tie:
                yield update, list(dict.fromkeys(tie))
                break


def _needed(graph: Graph, updates: list[Update]) -> set[int]:
    """The equations that these updates' gradients are made by."""
    todo, found = [v for u in updates for v in u.leaves], set()
    while todo:
        i = graph.maker.get(todo.pop())
        if i is not None and i not in found:
            found.add(i)
            todo += filter(is_var, graph.eqns[i].invars)
    return found


def _flows(graph: Graph, v, now: int) -> bool:
    """Whether a value is there by now, made by the step, and large enough to carry on."""
    made = is_var(v) and v in graph.maker and graph.maker[v] <= now
    return made and v.aval.ndim > 0 and jnp.issubdtype(v.aval.dtype, jnp.inexact)
