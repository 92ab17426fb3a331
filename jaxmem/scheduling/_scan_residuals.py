"""Residuals of a forward scan that the backward scan can make itself.

What the backward pass of a `scan` reads of the forward one is stacked, a layer on a
layer. Some of it need not be: what is elementwise, or a move, of other residuals, of
the forward scan's own inputs, or of something smaller; and a layer's output that is the
next layer's input, which the backward scan, coming from the end, has read one turn
before. All of these are made where they are read. No matmul, reduction or random bit
is computed twice; values are the same to rounding, and to the bit where only casts and
moves are done again.

What is stacked is the least from which all of it can be made (`_least.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jaxmem import _compat, _jaxpr
from jaxmem.scheduling._graph import Graph, Values
from jaxmem.scheduling._layer_axis import CHEAP, ELEMENTWISE
from jaxmem.scheduling._least import least, needed
from jaxmem.scheduling._scans import is_var, scan_like, size_of, split, xs_of

_AGAIN = ELEMENTWISE | CHEAP | {"concatenate", "iota", "name", "pad", "split"}


@dataclass(frozen=True)
class Late:
    """A residual that is a layer's output, as the next layer's input.

    Attributes:
      slot: position among the xs of the backward scan.
      early: the variable of the forward body that the next layer has instead.
      eqns: what is still to be done to it, one array each.
      chain: all that is done to the carry, for the last layer, which has no next.
      carry: its number.
    """

    slot: int
    early: Any
    eqns: tuple[Any, ...]
    chain: tuple[Any, ...]
    carry: int


@dataclass(frozen=True)
class Remake:
    """One pair of scans, and what the second makes itself.

    Attributes:
      forward, backward: positions of the scans.
      body: the graph of the forward body.
      slots: position among the xs of the backward scan -> variable of the forward body,
        of the residuals that only this scan reads and are no more stacked.
      late: those of them that come from the turn before.
      stays: the same of residuals that are stacked as before.
      kept: variables of the forward body that are stacked in their place.
      inputs: variables of the forward body that are inputs of the scan, no carries.
    """

    forward: int
    backward: int
    body: Graph
    slots: dict[int, Any]
    late: tuple[Late, ...]
    stays: dict[int, Any]
    kept: tuple[Any, ...]
    inputs: set[Any]
    stacks: tuple[Any, ...]  # the xs of the backward scan
    length: int

    @property
    def known(self) -> set[Any]:
        """What the backward body is given of the forward body's variables."""
        return {*self.kept, *self.stays.values(), *self.inputs}

    @property
    def wanted(self) -> list[Any]:
        """What it makes again."""
        late = {x.slot for x in self.late}
        now = [v for slot, v in self.slots.items() if slot not in late]
        return [*now, *(x.early for x in self.late)]

    def described(self) -> Iterator[tuple[Any, Any, str, int]]:
        """(aval, equation, words, 1) of stacks that are saved; -1: kept instead."""
        late = {x.slot for x in self.late}
        instead = list(self.kept)
        for slot, v in self.slots.items():
            like = next((w for w in instead if size_of(w) == size_of(v)), None)
            if like is not None and slot not in late:
                instead.remove(like)
                continue
            aval = self.stacks[slot].aval
            yield aval, self._maker(v), self._words(slot in late, v), 1
        for v in instead:
            aval = jax.ShapeDtypeStruct((self.length, *v.aval.shape), v.aval.dtype)
            yield aval, self._maker(v), "others are made of it", -1

    def _maker(self, v):
        return self.body.eqns[self.body.maker[v]] if v in self.body.maker else None

    def _words(self, late: bool, v) -> str:
        if late:
            return "the next layer's input, which the backward scan has just read"
        eqns = [self.body.eqns[i] for i in needed(self.body, [v], self.known)]
        ins = {w for e in eqns for w in e.invars if is_var(w)} | {v}
        if ins & {*self.kept, *self.stays.values()}:
            moved = all(e.primitive.name in CHEAP for e in eqns)
            return "another residual" if moved else "elementwise of other residuals"
        return "an input of the forward scan"


def remakes(closed) -> Iterator[Remake]:
    """The pairs of scans in which something can be saved."""
    graph = Graph(closed)
    for b, eqn in enumerate(graph.eqns):
        if eqn.primitive.name != "scan" or _compat.has_side_effects(eqn):
            continue
        made = (v for v in xs_of(eqn) if is_var(v) and v in graph.maker)
        for f in sorted({graph.maker[v] for v in made}):
            if _is_forward_of(graph.eqns[f], eqn):
                plan = _plan(graph, f, b)
                if plan is not None:
                    yield plan


# -- analysis


def _is_forward_of(first, eqn) -> bool:
    same = first.primitive.name == "scan" and not _compat.has_side_effects(first)
    return (
        same
        and first.params["length"] == eqn.params["length"]
        and first.params["reverse"] != eqn.params["reverse"]
    )


def _plan(graph: Graph, f: int, b: int) -> Remake | None:
    forward, backward = graph.eqns[f], graph.eqns[b]
    body = Graph(forward.params["jaxpr"])
    slots, fixed = {}, {}
    for slot, v in enumerate(xs_of(backward)):
        if is_var(v) and v in forward.outvars:
            inner = body.outvars[forward.outvars.index(v)]
            own = all(u == b for u in graph.users[v]) and v not in graph.outputs
            if is_var(inner):
                (slots if own else fixed)[slot] = inner
    inputs = _inputs(forward, body)
    free = {*inputs, *fixed.values()}
    kept, late = _least_kept(forward, body, slots, free)
    if _total(kept) >= _total(slots.values()):
        return None
    stays = {}
    for slot, v in slots.items():
        if v in kept and v not in stays.values():
            stays[slot] = v
    rest = {slot: v for slot, v in slots.items() if slot not in stays}
    new = tuple(v for v in kept if v not in stays.values())
    stays |= fixed
    stacks, length = tuple(xs_of(backward)), forward.params["length"]
    late = tuple(x for x in late if x.slot in rest)
    return Remake(f, b, body, rest, late, stays, new, inputs, stacks, length)


def _total(variables) -> int:
    return sum(map(size_of, variables))


def _inputs(forward, body: Graph) -> set[Any]:
    """Variables of the body that stand for inputs of the scan, carries excepted."""
    consts, _, xs = split(forward, body.arguments)
    return {*body.constants, *consts, *xs}


def _again(eqn) -> bool:
    one = eqn.primitive.name in _AGAIN
    return one and not _compat.has_side_effects(eqn)


def _least_kept(forward, body: Graph, slots, free) -> tuple[list[Any], list[Late]]:
    """What to stack, and which residuals to take from the turn before."""
    late: list[Late] = []

    def cut(late: Sequence[Late]) -> list[Any]:
        apart = {x.slot for x in late}
        now = [v for slot, v in slots.items() if slot not in apart]
        return least(body, [*now, *(x.early for x in late)], free, _again)

    best = cut(late)
    for x in _candidates(forward, body, slots):
        if _total(found := cut([*late, x])) < _total(best):
            late, best = [*late, x], found
    return best, late


def _candidates(forward, body: Graph, slots) -> Iterator[Late]:
    """Residuals that casts and moves alone make of a carry that the body puts out."""
    early = split(forward, body.arguments)[1]
    ends = body.outvars[: len(early)]
    late = {v: k for k, v in enumerate(ends) if is_var(v)}
    for slot, v in slots.items():
        chain: list[Any] = []
        while v not in late and v in body.maker and _moves(eqn := _eqn_of(body, v)):
            chain.insert(0, eqn)
            v = eqn.invars[0]
        if v in late and v not in early:
            at, rest = _same_of(body, early[late[v]], chain)
            yield Late(slot, at, tuple(rest), tuple(chain), late[v])


def _eqn_of(body: Graph, v):
    return body.eqns[body.maker[v]]


def _moves(eqn) -> bool:
    one = len(eqn.invars) == 1 and is_var(eqn.invars[0])
    return one and eqn.primitive.name in {*CHEAP, "name"}


def _same_of(body: Graph, v, chain: list[Any]) -> tuple[Any, list[Any]]:
    """How far the body does the same to `v`: that variable, and what is left to do."""
    for i, eqn in enumerate(chain):
        users = (body.eqns[u] for u in body.users.get(v, ()))
        alike = [e for e in users if _alike(e, eqn)]
        if not alike:
            return v, chain[i:]
        v = alike[0].outvars[0]
    return v, []


def _alike(a, b) -> bool:
    return a.primitive is b.primitive and a.params == b.params


# -- the new jaxpr


def remake(closed, plan: Remake):
    """The jaxpr with these residuals made in the backward scan."""
    graph = Graph(closed)
    forward, backward = graph.eqns[plan.forward], graph.eqns[plan.backward]

    def run(args: list) -> list:
        values = Values(graph, graph.inputs(args))
        values.evaluate_before(plan.forward)
        ins = [values.read(v) for v in forward.invars]
        outs, kept = _run_forward(forward, ins, plan)
        values.put(plan.forward, outs)
        values.evaluate_before(plan.backward)
        last = [_apply(x.chain, outs[x.carry]) for x in plan.late]
        given = _given(forward, ins, plan)
        given = Given(given.whole, given.slices | kept)
        ins = [values.read(v) for v in backward.invars]
        outs = _run_backward(backward, ins, plan, given, last)
        values.put(plan.backward, outs)
        return values.all_outputs()

    return _jaxpr.retrace(closed, run)


def _run_forward(eqn, values: list, plan: Remake) -> tuple[list, dict[Any, Any]]:
    """Outputs of the forward scan, and the stacks of what is kept instead."""
    consts, init, xs = split(eqn, values)
    body = plan.body

    def step(carry, x):
        inner = Values(body, body.inputs([*consts, *carry, *x]))
        outs = inner.all_outputs()
        return outs[: len(init)], (outs[len(init) :], [inner.env[v] for v in plan.kept])

    ends, (ys, kept) = scan_like(eqn, step, init, xs)
    return [*ends, *ys], dict(zip(plan.kept, kept, strict=True))


class Given(NamedTuple):
    """Variables of the forward body: the same in every turn, and stacked."""

    whole: dict[Any, Any]
    slices: dict[Any, Any]


def _given(forward, values: list, plan: Remake) -> Given:
    """The inputs of the forward scan that the backward body needs."""
    eqns = needed(plan.body, plan.wanted, plan.known)
    read = {v for i in eqns for v in plan.body.eqns[i].invars if is_var(v)}
    read |= set(plan.wanted)
    consts, _, xs = split(forward, list(zip(plan.body.arguments, values, strict=True)))
    whole, slices = ({v: x for v, x in part if v in read} for part in (consts, xs))
    return Given(plan.body.constants | whole, slices)


def _run_backward(eqn, values: list, plan: Remake, given: Given, last: list) -> list:
    consts, init, xs = split(eqn, values)
    eqns = needed(plan.body, plan.wanted, plan.known)

    def step(carry, turn):
        inner, before = carry
        x, now = dict(turn[0]), dict(zip(given.slices, turn[1], strict=True))
        known = {v: x[slot] for slot, v in plan.stays.items()}
        values = Values(plan.body, {**given.whole, **known, **now})
        for i in eqns:
            values.evaluate(i)
        x |= {slot: values.env[v] for slot, v in plan.slots.items() if v in values.env}
        x |= {late.slot: b for late, b in zip(plan.late, before, strict=True)}
        args = [*consts, *inner, *(x[i] for i in range(len(xs)))]
        outs = _jaxpr.evaluate(eqn.params["jaxpr"], args)
        after = [_apply(late.eqns, values.env[late.early]) for late in plan.late]
        return (outs[: len(init)], after), outs[len(init) :]

    stays = {i: x for i, x in enumerate(xs) if i not in plan.slots}
    turns = stays, list(given.slices.values())
    (ends, _), ys = scan_like(eqn, step, (init, last), turns)
    return [*ends, *ys]


def _apply(eqns: Sequence[Any], value):
    for eqn in eqns:
        (value,) = _compat.bind(eqn, [value])
    return value
