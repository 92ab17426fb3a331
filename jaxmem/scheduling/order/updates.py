"""Unrolled layers: each is updated right after its gradient.

A compiler that is free to may put all weight gradients, or all updates, at the end of
the backward pass, and keeps all of them until then. Here a barrier after the update of
a parameter takes the updated state and the cotangent that flows on.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import JaxprGraph, Values
from jaxmem.ir.primitives import Kind
from jaxmem.ir.propagation import shardings_in
from jaxmem.ir.scans import LARGE, barrier, is_var
from jaxmem.ir.shards import WHOLE, InputShardings, Shardings


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

    def add(self, other: "Update") -> None:
        """Takes what another one makes of the same gradients."""
        self.eqns |= other.eqns
        self.leaves |= other.leaves
        self.outs += other.outs
        self.apart += other.apart
        self.own = max(self.own, other.own)
        self.number = max(self.number, other.number)


def in_order(closed, aliases: Mapping[int, int], given: InputShardings | None = None):
    """The jaxpr with a barrier after each large update that more gradients follow.

    `given`: how the inputs are sharded over devices.
    """
    graph = JaxprGraph(closed)
    found = updates_of(graph, aliases)
    shardings = shardings_in(closed, given) if found else WHOLE
    updates = [update for update in found if _is_in_place(update, shardings)]
    updates.sort(key=lambda u: u.ready)
    large = [u for u in updates if sum(map(shardings.bytes_of, u.outs)) >= LARGE]
    ties = {u.ready: (u, tie) for u, tie in _ties(graph, updates, large, aliases)}
    if not ties:
        return closed

    def run(args: list) -> list:
        values = Values(graph, graph.inputs(args))
        for i, (update, tie) in sorted(ties.items()):
            values.evaluate_before(i + 1)
            for k in sorted(update.eqns):
                values.evaluate(k)
            # the backward pass goes on from behind the barrier, when the update is done
            held = [*update.outs, tie]
            through = barrier([values.env[v] for v in held])
            values.env.update(zip(held, through, strict=True))
        return values.all_outputs()

    return jaxprs.retrace(closed, run)


def updates_of(graph: JaxprGraph, aliases: Mapping[int, int]) -> list[Update]:
    """One for each set of outputs that are made of the same gradient."""
    made_by = _made_by(graph)
    update_of = lambda o, v: _update(graph, v, o in aliases, made_by)
    parts = (update_of(o, v) for o, v in enumerate(graph.outvars))
    found = [update for update in parts if update is not None]
    # a parameter and its moments start from one gradient: they are one update
    root = list(range(len(found)))
    first: dict[Any, int] = {}  # of a gradient, the place of who starts from it

    def root_of(k: int) -> int:
        while root[k] != k:
            root[k] = root[root[k]]
            k = root[k]
        return k

    for k, update in enumerate(found):
        for v in update.leaves:
            a, b = root_of(k), root_of(first.setdefault(v, k))
            root[max(a, b)] = min(a, b)
    for k, update in enumerate(found):
        if root[k] != k:
            found[root_of(k)].add(update)
    return [update for k, update in enumerate(found) if root[k] == k]


def _is_in_place(update: Update, shardings: Shardings) -> bool:
    """Whether it frees the gradients' memory: what it makes has none of its own."""
    # State that is not donated has memory of its own from the beginning, in which the
    # gradient can lie as long as the update waits: then nothing is put in order.
    some = len(update.apart) < len(update.outs)
    size = lambda variables: sum(map(shardings.bytes_of, variables))
    return some and size(update.apart) < size(update.leaves)


def _update(
    graph: JaxprGraph, out, is_aliased: bool, made_by: Mapping[Any, int]
) -> Update | None:
    if not is_var(out):
        return None
    eqns, leaves = _elementwise_cone(graph, out)
    arrays = {v for v in leaves if v.aval.ndim}
    gradients = {v for v in arrays if not graph.is_given(v)}
    if not eqns or not gradients:
        return None
    # in place means after the last reader of the old state: the backward pass itself
    old = [u for v in arrays - gradients for u in graph.users.get(v, ())]
    own = max([*(i for i in old if i not in eqns), *(made_by[v] for v in gradients)])
    number = max((made_by.get(v, -1) for v in leaves - arrays), default=-1)
    apart = [] if is_aliased else [out]
    return Update(eqns, [out], apart, gradients, own, number)


def _elementwise_cone(graph: JaxprGraph, out) -> tuple[set[int], set[Any]]:
    """The equations of an update, and the variables that they start from."""
    eqns, leaves, todo = set(), set(), [out]
    while todo:
        v = todo.pop()
        i = graph.maker.get(v)
        # a number may be read by every update: what it is made of is followed once
        followed = v.aval.ndim and not graph.is_given(v)
        if i is not None and followed and _is_of_update(graph.eqns[i]):
            if i not in eqns:
                eqns.add(i)
                todo += filter(is_var, graph.eqns[i].invars)
        else:
            leaves.add(v)
    return eqns, leaves


def _made_by(graph: JaxprGraph) -> dict[Any, int]:
    """When a variable can be there: a number waits for the arrays that it is made of.

    -1 for a number that is made of no array.
    """
    known: dict[Any, int] = {}
    for i, eqn in enumerate(graph.eqns):
        waits = (known.get(v, -1) for v in filter(is_var, eqn.invars))
        number = i if any(v.aval.ndim for v in eqn.invars) else max(waits, default=-1)
        known.update((v, i if v.aval.ndim else number) for v in eqn.outvars)
    return known


def _ties(
    graph: JaxprGraph,
    updates: Sequence[Update],
    large: Sequence[Update],
    aliases: Mapping[int, int],
) -> Iterator[tuple[Update, Any]]:
    """What the backward pass goes on with after each of the large updates."""
    inside = {i for u in updates for i in u.eqns}
    for update in large:
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


def _is_of_update(eqn) -> bool:
    known = primitives.of(eqn)
    return known.elementwise or known.kind in (Kind.SHAPE, Kind.IDENTITY)


def _by_scan(graph: JaxprGraph, v) -> bool:
    return v in graph.maker and primitives.is_scan(graph.eqns[graph.maker[v]])


def _flows(graph: JaxprGraph, v, now: int) -> bool:
    """Whether a value is there by now, made by the step, and carries a cotangent."""
    made = is_var(v) and v in graph.maker and graph.maker[v] <= now
    return made and v.aval.ndim > 0 and jnp.issubdtype(v.aval.dtype, jnp.inexact)
