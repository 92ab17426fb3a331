"""Residuals of a forward scan that the backward scan can make itself.

What the backward pass of a `scan` reads of the forward one is stacked, a layer on a
layer. Some of it need not be: what is elementwise, or a move, of other residuals, of
the forward scan's own inputs, or of something smaller; and a layer's output that is the
next layer's input, which the backward scan, coming from the end, has read one turn
before. All of these are made where they are read. No matmul, reduction or random bit
is computed twice; values are the same to rounding, and to the bit where only casts and
moves are done again.

What is stacked is the least from which all of it can be made (`minimum_cut.py`).
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jaxmem import _compat, _jaxpr
from jaxmem._bits import pack_bits, unpack_bits
from jaxmem.ir.costs import fused_only
from jaxmem.ir.graph import JaxprGraph, Values
from jaxmem.ir.layer_axis import CHEAP
from jaxmem.ir.scans import (
    is_mask,
    is_var,
    kept_size,
    scan_like,
    size_of,
    split,
)
from jaxmem.scheduling.recompute.minimum_cut import Price, needed
from jaxmem.scheduling.recompute.pairs import Cut, Late, Pair, cut, cut_by_names, pairs


@dataclass(frozen=True)
class Remake:
    """A pair of scans, and what the second makes itself.

    Attributes:
      pair: the scans.
      slots: position among the xs of the backward scan -> variable of the forward body,
        of the residuals that are no more stacked.
      late: those of them that come from the turn before.
      stays: the same of residuals that are stacked as before.
      kept: variables of the forward body that are stacked in their place.
      away: those of them that wait in the host's memory.
      turns: in how many of the layers, the first of the forward scan.
    """

    pair: Pair
    slots: dict[int, Any]
    late: tuple[Late, ...]
    stays: dict[int, Any]
    kept: tuple[Any, ...]
    away: frozenset[Any]
    turns: int

    @property
    def body(self) -> JaxprGraph:
        return self.pair.body

    @property
    def known(self) -> set[Any]:
        """What the backward body is given of the forward body's variables."""
        return {*self.kept, *self.stays.values(), *self.pair.inputs}

    @property
    def wanted(self) -> list[Any]:
        """What it makes again."""
        late = {x.slot for x in self.late}
        now = [v for slot, v in self.slots.items() if slot not in late]
        return [*now, *(x.early for x in self.late)]

    def described(self) -> Iterator[tuple[Any, Any, str, int]]:
        """(aval, equation, words, 1) of stacks that are saved; -1: kept instead."""
        late = {x.slot for x in self.late}
        instead = [v for v in self.kept if not is_mask(v) and v not in self.away]
        for slot, v in self.slots.items():
            like = [w for w in instead if size_of(w) == size_of(v)]
            if like and slot not in late:
                instead.remove(like[0])
                continue
            aval = self.pair.stacks[slot].aval
            aval = jax.ShapeDtypeStruct((self.turns, *aval.shape[1:]), aval.dtype)
            yield aval, self.maker(v), self._words(slot in late, v), 1
        masks = [v for v in self.kept if is_mask(v) and v not in self.away]
        for v in [*instead, *masks]:
            yield stacked(v, self.turns), self.maker(v), _words_instead(v), -1

    @property
    def offloaded(self) -> int:
        """Bytes that wait in the host's memory."""
        return self.turns * sum(map(kept_size, self.away))

    @functools.cached_property
    def repeated(self) -> list[tuple[Any, int]]:
        """(equation, how often) of what is evaluated again and costs something."""
        eqns = [self.body.eqns[i] for i in needed(self.body, self.wanted, self.known)]
        return [(e, self.turns) for e in eqns if fused_only(e) is None]

    def maker(self, v):
        """The equation of the forward body that makes a variable, if one does."""
        return self.body.eqns[self.body.maker[v]] if v in self.body.maker else None

    def _words(self, late: bool, v) -> str:
        if v in self.away:
            return "itself, from the host's memory"
        if v in self.kept:
            return "itself in bits"
        if late:
            return "of the next layer's input, which the backward scan has just read"
        eqns = [self.body.eqns[i] for i in needed(self.body, [v], self.known)]
        ins = {w for e in eqns for w in e.invars if is_var(w)} | {v}
        if ins & {*self.kept, *self.stays.values()}:
            return _words_for(eqns)
        return "an input of the forward scan"


def _words_instead(v) -> str:
    return (
        "a mask, eight elements to the byte" if is_mask(v) else "others are made of it"
    )


def _words_for(eqns: Sequence[Any]) -> str:
    """What is done to residuals to make another one."""
    names = dict.fromkeys(e.primitive.name for e in eqns)
    if all(name in CHEAP for name in names):
        return "another residual"
    if all(fused_only(e) is not None for e in eqns):
        return "elementwise of other residuals"
    paid = (e.primitive.name for e in eqns if fused_only(e) is None)
    return f"computed again: {', '.join(dict.fromkeys(paid))}"


def remakes(
    closed,
    price: Price = fused_only,
    part: float = 1.0,
    offload: int | None = None,
) -> Iterator[Remake]:
    """The pairs of scans in which something can be saved, at `price` or less.

    With `part` below one, in as large a part of the layers, rounded to a layer. What is
    kept and takes `offload` bytes or more waits in the host's memory.
    """
    for pair in pairs(closed):
        turns = round(part * pair.length)
        found = cut(pair, price, late=turns == pair.length)
        plan = _plan(pair, found, turns, offload)
        if turns and (found.worth < pair.bytes or plan.away):
            yield plan


def remakes_by_names(closed, price: Price) -> Iterator[Remake]:
    """The pairs of scans in which something is kept that has no name."""
    for pair in pairs(closed):
        plan = _plan(pair, cut_by_names(pair, price), pair.length)
        if plan.slots:
            yield plan


# -- analysis


def _plan(pair: Pair, found: Cut, turns: int, offload: int | None = None) -> Remake:
    whole = turns == pair.length
    least = math.inf if offload is None else offload
    away = frozenset(v for v in found.kept if kept_size(v) >= least)
    stays = {}
    for slot, v in pair.slots.items():
        otherwise = (whole and is_mask(v)) or v in away
        if v in found.kept and v not in stays.values() and not otherwise:
            stays[slot] = v
    slots = {slot: v for slot, v in pair.slots.items() if slot not in stays}
    kept = tuple(v for v in found.kept if v not in stays.values())
    late = tuple(x for x in found.late if x.slot in slots)
    return Remake(pair, slots, late, stays | pair.fixed, kept, away, turns)


# -- the new jaxpr


def remake(closed, plan: Remake):
    """The jaxpr with these residuals made in the backward scan."""

    def backward(eqn, ins: list, given: Given, outs: list, kept: dict) -> list:
        last = [_apply(x.chain, outs[x.carry]) for x in plan.late]
        both = Given(given.whole, given.slices | kept)
        return _run_backward(eqn, ins, plan, both, last)

    return rebuilt(closed, plan, _run_forward, backward)


def rebuilt(closed, plan: Remake, run_forward: Callable, run_backward: Callable):
    """The jaxpr with both scans replaced.

    `run_forward(equation, its values, plan)` gives its outputs, and what it keeps for
    `run_backward(equation, its values, given, these outputs, what was kept)`.
    """
    graph = JaxprGraph(closed)
    forward, backward = graph.eqns[plan.pair.forward], graph.eqns[plan.pair.backward]

    def run(args: list) -> list:
        values = Values(graph, graph.inputs(args))
        values.evaluate_before(plan.pair.forward)
        ins = [values.read(v) for v in forward.invars]
        outs, kept = run_forward(forward, ins, plan)
        values.put(plan.pair.forward, outs)
        values.evaluate_before(plan.pair.backward)
        own = given(forward, ins, plan)
        ins = [values.read(v) for v in backward.invars]
        values.put(plan.pair.backward, run_backward(backward, ins, own, outs, kept))
        return values.all_outputs()

    return _jaxpr.retrace(closed, run)


def _run_forward(eqn, values: list, plan: Remake) -> tuple[list, dict[Any, Any]]:
    """Outputs of the forward scan, and the stacks of what is kept instead."""
    consts, init, xs = split(eqn, values)
    body = plan.body

    def step(carry, x):
        inner = Values(body, body.inputs([*consts, *carry, *x]))
        outs = inner.all_outputs()
        kept = [_sent(plan, v, packed(v, inner.env[v])) for v in plan.kept]
        return outs[: len(init)], (outs[len(init) :], kept)

    ends, (ys, kept) = scan_like(eqn, step, init, xs)
    return [*ends, *ys], dict(zip(plan.kept, kept, strict=True))


def _sent(plan: Remake, v, value):
    return jax.device_put(value, jax.memory.Space.Host) if v in plan.away else value


def _fetched(plan: Remake, v, value):
    return jax.device_put(value, jax.memory.Space.Device) if v in plan.away else value


def packed(v, value):
    return pack_bits(value) if is_mask(v) else value


def stacked(v, rows: int) -> jax.ShapeDtypeStruct:
    """That many rows of what `packed` makes of a variable."""
    row = jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
    row = jax.eval_shape(pack_bits, row) if is_mask(v) else row
    return jax.ShapeDtypeStruct((rows, *row.shape), row.dtype)


def unpacked(v, value):
    return unpack_bits(value, v.aval.shape) if is_mask(v) else value


class Given(NamedTuple):
    """Variables of the forward body: the same in every turn, and stacked."""

    whole: dict[Any, Any]
    slices: dict[Any, Any]


def given(forward, values: list, plan: Remake) -> Given:
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
        now |= {v: unpacked(v, _fetched(plan, v, now[v])) for v in plan.kept}
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
        (value,) = _compat.bind(
            eqn, [value if is_var(v) else v.val for v in eqn.invars]
        )
    return value
