"""Residuals of a forward scan that the backward scan makes a segment at a time.

Where even one input for each layer is too much, only the first layer of a segment keeps
its own. When the backward scan comes to a segment it runs the layers of it forward
again, and has in a buffer what each of them would have kept; from there on a layer goes
as in `_scan_residuals`. Of L layers in segments of S that is the inputs of L / S
layers, and what S layers keep, at the price of one more forward pass less a segment:
what the last one keeps is there when the forward pass ends. (Chen et al. 2016, section
4.1: with S the root of L, memory is of that order too.)

The backward scan stays one scan over all layers, with a loop inside that has no turn
but at the end of a segment: what comes after it (an update released into it) finds it
as it was.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import _compat, _jaxpr
from jaxmem.scheduling._graph import Values
from jaxmem.scheduling._least import Price, needed
from jaxmem.scheduling._machine import MACHINES, fused_only, seconds
from jaxmem.scheduling._pairs import Cut, Pair, cut, pairs
from jaxmem.scheduling._scan_residuals import (
    Given,
    Remake,
    aval_kept,
    packed,
    rebuilt,
    unpacked,
)
from jaxmem.scheduling._scans import ahead, is_var, kept_size, scan_like, split


@dataclass(frozen=True)
class Segments:
    """A pair of scans, and the segments in which the second runs the first again.

    Attributes:
      remake: what a layer keeps, and what it makes of that.
      size: layers in a segment; the first segment has what is left.
      carried: numbers of the carries that the first layer of a segment keeps.
      replayed: equations of the forward body that a segment is run again by.
    """

    remake: Remake
    size: int
    carried: tuple[int, ...]
    replayed: tuple[Any, ...]

    @property
    def pair(self) -> Pair:
        return self.remake.pair

    @property
    def offloaded(self) -> int:
        """Bytes that wait in the host's memory."""
        return self.remake.offloaded

    @property
    def count(self) -> int:
        """How many segments."""
        return -(-self.pair.length // self.size)

    @property
    def starts(self) -> list[Any]:
        """Variables of the forward body that the first layer of a segment keeps."""
        early = _carries(self.pair)
        return [early[k] for k in self.carried]

    @property
    def bytes(self) -> int:
        """What is kept in all."""
        starts = self.count * sum(map(kept_size, self.starts))
        return starts + self.size * sum(map(kept_size, self.remake.kept))

    @property
    def repeated(self) -> list[tuple[Any, int]]:
        """(equation, how often) of what is evaluated again and costs something."""
        paid = [e for e in self.replayed if fused_only(e) is None]
        times = self.pair.length - self.size
        return [*self.remake.repeated, *((e, times) for e in paid)]

    def described(self) -> Iterator[tuple[Any, Any, str, int]]:
        """(aval, equation, words, 1) of stacks that are saved; -1: kept instead."""
        for slot, v in self.remake.slots.items():
            words = "of the segment's first layer, whose layers are run again"
            yield self.pair.stacks[slot].aval, self.remake.maker(v), words, 1
        for v in self.starts:
            yield _stacked(v, self.count), None, "of a segment's first layer", -1
        for v in self.remake.kept:
            words = "of the layers of one segment"
            yield _stacked(v, self.size), self.remake.maker(v), words, -1


def of_every_size(pair: Pair, found: Cut) -> Iterator[Segments]:
    """The segments of a pair whose layers keep `found`, where they save something.

    None where the cost of an equation is not known.
    """
    slots, turns = dict(pair.slots), pair.length
    remake = Remake(pair, slots, (), pair.fixed, found.kept, frozenset(), turns)
    carried = _carried(pair, found.kept)
    replayed = _replayed_by(pair, found.kept, carried)
    known = all(seconds(e, MACHINES["cpu"]) is not None for e in replayed)
    if not carried or not known or found.late:
        return
    for size in range(2, pair.length):
        plan = Segments(remake, size, carried, replayed)
        if plan.bytes < pair.length * found.bytes:
            yield plan


def segmented(closed, price: Price, size: int) -> Iterator[Segments]:
    """The pairs of scans of which less is kept in segments."""
    for pair in pairs(closed):
        plans = of_every_size(pair, cut(pair, price, late=False))
        yield from (plan for plan in plans if plan.size == size)


def _carries(pair: Pair) -> list[Any]:
    """The carries of the forward body, as they come in."""
    return [v for v in pair.body.arguments if v not in pair.inputs]


def _carried(pair: Pair, kept) -> tuple[int, ...]:
    """Which carries a layer needs to make `kept`, of itself and of those after it."""
    body, early = pair.body, _carries(pair)
    found: set[int] = set()
    while True:
        ends = [body.outvars[k] for k in found]
        eqns = body.cone(filter(is_var, [*kept, *ends]))
        read = {v for i in eqns for v in body.eqns[i].invars if is_var(v)}
        read |= {v for v in [*kept, *ends] if is_var(v)}
        more = {k for k, v in enumerate(early) if v in read}
        if more <= found:
            return tuple(sorted(found))
        found |= more


def _replayed_by(pair: Pair, kept, carried: tuple[int, ...]) -> tuple[Any, ...]:
    """The equations that make what a layer keeps, and the next input, of its input."""
    body = pair.body
    known = {*body.constants, *body.arguments}
    wanted = filter(is_var, [*kept, *(body.outvars[k] for k in carried)])
    return tuple(body.eqns[i] for i in needed(body, wanted, known))


def _stacked(v, rows: int):
    aval = aval_kept(v)
    return jax.ShapeDtypeStruct((rows, *aval.shape), aval.dtype)


# -- the new jaxpr


def remake_segments(closed, plan: Segments):
    """The jaxpr with the forward scan run again in the backward one."""

    def forward(eqn, ins: list, _) -> tuple[list, "_Kept"]:
        return _run_forward(eqn, ins, plan)

    def backward(eqn, ins: list, given: Given, _, kept: "_Kept") -> list:
        return _run_backward(eqn, ins, plan, given, kept)

    return rebuilt(closed, plan.remake, forward, backward)


@dataclass(frozen=True)
class _Kept:
    """What the backward scan has of the forward one.

    Attributes:
      starts: carries of the first layers of all segments but the last, which comes
        first here; a row more takes what nobody reads.
      rows: what the layers of the last segment keep.
      consts, xs: the inputs of the forward scan.
      reverse: whether it runs from the end.
    """

    starts: list[Any]
    rows: list[Any]
    consts: list[Any]
    xs: list[Any]
    reverse: bool


def _run_forward(eqn, values: list, plan: Segments) -> tuple[list, _Kept]:
    """Outputs of the forward scan, and what it keeps.

    A layer that is not the first of a segment writes where the next first one, or the
    next layer of that place in a segment, will write over it.
    """
    consts, init, xs = split(eqn, values)
    body, size, unread = plan.pair.body, plan.size, plan.count - 1
    starts = [_empty(v, plan.count) for v in plan.starts]
    starts = _written(starts, _starts(plan, init), unread - 1)
    rows = [_empty(v, size) for v in plan.remake.kept]

    def step(carry, x):
        left, inner, starts, rows = carry  # layers to come, this one included
        values = Values(body, body.inputs([*consts, *inner, *x]))
        outs = values.all_outputs()
        at = jnp.where(left < 2 * size, unread, left // size - 2)
        starts = _written(starts, _starts(plan, inner), at)
        kept = [packed(v, values.read(v)) for v in plan.remake.kept]
        rows = _written(rows, kept, (size - left) % size)
        return (left - 1, outs[: len(init)], starts, rows), outs[len(init) :]

    start = jnp.int32(plan.pair.length), init, starts, rows
    (_, ends, starts, rows), ys = scan_like(eqn, step, start, xs)
    return [*ends, *ys], _Kept(starts, rows, consts, xs, eqn.params["reverse"])


def _run_backward(eqn, values: list, plan: Segments, given: Given, kept: _Kept) -> list:
    consts, init, xs = split(eqn, values)
    remake, size = plan.remake, plan.size
    body, slots = remake.body, remake.slots
    weights = [ahead(x) for x in kept.xs]

    def step(carry, turn):
        done, inner, rows = carry  # layers that have been here
        left = plan.pair.length - done
        rows = _replayed(plan, kept, weights, done, rows)
        at = (left - 1) - jnp.maximum(left + done % size - size, 0)
        x, now = dict(turn[0]), dict(zip(given.slices, turn[1], strict=True))
        known = {v: x[slot] for slot, v in remake.stays.items()}
        for v, row in zip(remake.kept, rows, strict=True):
            now[v] = unpacked(v, lax.dynamic_index_in_dim(row, at, 0, keepdims=False))
        inside = Values(body, {**given.whole, **known, **now})
        x |= {slot: inside.read(v) for slot, v in slots.items()}
        args = [*consts, *inner, *(x[i] for i in range(len(xs)))]
        outs = _jaxpr.evaluate(eqn.params["jaxpr"], args)
        return (done + 1, outs[: len(init)], rows), outs[len(init) :]

    stays = {i: x for i, x in enumerate(xs) if i not in slots}
    turns = stays, list(given.slices.values())
    start = jnp.int32(0), init, kept.rows
    (_, ends, _), ys = scan_like(eqn, step, start, turns)
    return [*ends, *ys]


def _replayed(plan: Segments, kept: _Kept, weights: list, done, rows: list) -> list:
    """What the layers of a segment keep: as it is, or of a new segment at its end."""
    body, length, size = plan.pair.body, plan.pair.length, plan.size
    left = length - done
    new = (done > 0) & (done % size == 0)
    turns = jnp.where(new, jnp.minimum(left, size), 0)
    number = jnp.maximum(done // size - 1, 0)
    first = [
        unpacked(v, lax.dynamic_index_in_dim(stack, number, 0, keepdims=False))
        for v, stack in zip(plan.starts, kept.starts, strict=True)
    ]

    def layer(i, carry):
        inner, rows = carry
        j = left - turns + i
        j = length - 1 - j if kept.reverse else j
        x = [lax.dynamic_index_in_dim(w, j, 0, keepdims=False) for w in weights]
        now = dict(zip(plan.carried, inner, strict=True))
        carries = [now.get(k) for k in range(len(_carries(plan.pair)))]
        values = Values(body, body.inputs([*kept.consts, *carries, *x]))
        made = [packed(v, values.read(v)) for v in plan.remake.kept]
        ends = [values.read(body.outvars[k]) for k in plan.carried]
        return ends, _written(rows, made, i)

    return lax.fori_loop(0, turns, layer, (first, rows))[1]


def _empty(v, rows: int):
    aval = _stacked(v, rows)
    return _compat.varying_as(jnp.zeros(aval.shape, aval.dtype), v.aval)


def _starts(plan: Segments, carry: list) -> list:
    """What the first layer of a segment keeps of its carry."""
    return [packed(v, carry[k]) for k, v in zip(plan.carried, plan.starts, strict=True)]


def _written(stacks: list, values: list, at) -> list:
    write = lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, at, 0)
    return list(map(write, stacks, values))
