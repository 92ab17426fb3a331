"""Residuals of a forward scan that the backward scan recomputes a segment at a time.

Only the first layer of a segment keeps its input (`segments.py`). When the backward
scan comes to a segment, it runs its layers forward a second time and buffers what each
of them, or the first layers of the segments inside, would have kept.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from jaxmem import _compat
from jaxmem.ir.graph import Values
from jaxmem.ir.scans import ahead, run_body, scan_like, split
from jaxmem.scheduling._choice import Count, Rate
from jaxmem.scheduling.recompute.pair_rewrite import (
    Given,
    packed,
    rebuilt,
    stacked,
    unpacked,
)
from jaxmem.scheduling.recompute.segments import Segments, carries


@dataclass(frozen=True)
class InSegments:
    """In which segments the backward scans run the forward ones a second time."""

    name: ClassVar[str] = "segments"
    # as `Recompute.rate`, of what a layer keeps within its segment
    rate: Rate | None = None
    # layers in a segment, of which only the first keeps its input until the backward
    # pass runs them forward a second time, and in one of the segments inside of it;
    # empty: every layer keeps its own input
    sizes: tuple[Count, ...] = ()


def with_segments(closed, plan: Segments):
    """The jaxpr with the forward scan run a second time in the backward one."""

    def forward(eqn, ins: list, _) -> tuple[list, "_Kept"]:
        return _run_forward(eqn, ins, plan)

    def backward(eqn, ins: list, given: Given, _, kept: "_Kept") -> list:
        return _run_backward(eqn, ins, plan, given, kept)

    return rebuilt(closed, plan.layer, forward, backward)


# For each size what the first layers of its segments keep, then what layers keep.
_Stacks = list[list[Any]]


@dataclass(frozen=True)
class _Kept:
    """What the backward scan has of the forward one, whose inputs it reads too."""

    stacks: _Stacks
    consts: list[Any]
    xs: list[Any]
    reverse: bool  # whether it runs from the end


def _run_forward(eqn, values: list, plan: Segments) -> tuple[list, _Kept]:
    """Outputs of the forward scan, and what it keeps."""
    consts, init, xs = split(eqn, values)
    body, length = plan.pair.body, plan.pair.length

    def step(carry, x):
        after, inner, stacks = carry  # layers still to come
        values = Values(body, body.inputs([*consts, *inner, *x]))
        outs = values.all_outputs()
        first = after == length - 1
        stacks = _noted(plan, 0, after, first, inner, values, stacks)
        return (after - 1, outs[: len(init)], stacks), outs[len(init) :]

    start = jnp.int32(length - 1), init, _empty(plan)
    (_, ends, stacks), ys = scan_like(eqn, step, start, xs)
    return [*ends, *ys], _Kept(stacks, consts, xs, eqn.params["reverse"])


def _run_backward(eqn, values: list, plan: Segments, given: Given, kept: _Kept) -> list:
    # One scan over all layers, with a loop inside for each size that iterates only at
    # the end of a segment: an update that is released into the scan finds it as it was.
    consts, init, xs = split(eqn, values)
    own, size = plan.layer, plan.sizes[-1]
    body, slots = own.body, own.slots
    outermost, *inside = kept.stacks
    kept = replace(kept, xs=[ahead(x) for x in kept.xs])

    def step(carry, item):
        done, inner, inside = carry  # layers that have been here
        stacks = [outermost, *inside]
        for level in range(len(plan.sizes)):
            stacks = _run_forward_again(plan, level, kept, done, stacks)
        rows = _read(own.instead, stacks[-1], size - 1 - done % size)
        x, now = dict(item[0]), dict(zip(given.slices, item[1], strict=True))
        known = {v: x[slot] for slot, v in own.stays.items()}
        values = Values(body, {**given.whole, **known, **now, **rows})
        x |= {slot: values.read(v) for slot, v in slots.items()}
        carry, rows = run_body(eqn, consts, inner, [x[i] for i in range(len(xs))])
        return (done + 1, carry, stacks[1:]), rows

    stays = {i: x for i, x in enumerate(xs) if i not in slots}
    items = stays, list(given.slices.values())
    (_, ends, _), ys = scan_like(eqn, step, (jnp.int32(0), init, inside), items)
    return [*ends, *ys]


def _run_forward_again(plan: Segments, level: int, kept: _Kept, done, stacks: _Stacks):
    """The stacks, where a segment of a size begins from its end: of its layers."""
    # Of the last segment they are what they should be.
    body, size = plan.pair.body, plan.sizes[level]
    within = done % plan.whole[level]
    new = (within > 0) & (within % size == 0)
    count = jnp.where(new, jnp.minimum(plan.pair.length - done, size), 0)
    row = _row_of(plan, level, done)
    start = [*_read(plan.starts, stacks[level], row).values()]

    def layer(i, carry):
        inner, inside = carry
        after = done + count - 1 - i
        j = after if kept.reverse else plan.pair.length - 1 - after
        x = [lax.dynamic_index_in_dim(w, j, 0, keepdims=False) for w in kept.xs]
        now = dict(zip(plan.carried, inner, strict=True))
        carry = [now.get(k) for k in range(len(carries(plan.pair)))]
        values = Values(body, body.inputs([*kept.consts, *carry, *x]))
        inside = _noted(plan, level + 1, after, i == 0, carry, values, inside)
        return [values.read(body.outvars[k]) for k in plan.carried], inside

    inside = lax.fori_loop(0, count, layer, (start, stacks[level + 1 :]))[1]
    return [*stacks[: level + 1], *inside]


# -- the stacks


def _empty(plan: Segments) -> _Stacks:
    """A row for each segment of a size but the last, whose own nobody reads."""
    starts = [[_zeros(v, count) for v in plan.starts] for count in plan.counts]
    return [*starts, [_zeros(v, plan.sizes[-1]) for v in plan.layer.instead]]


def _zeros(v, rows: int):
    aval = stacked(v, rows)
    return _compat.typed_as(jnp.zeros(aval.shape, aval.dtype), v.aval)


def _row_of(plan: Segments, level: int, after):
    """The row of a segment: that of a layer with `after` layers behind it."""
    number = after % plan.whole[level] // plan.sizes[level]  # from the end
    return jnp.where(number > 0, number, plan.counts[level]) - 1


def _noted(plan: Segments, outer: int, after, first, carry, values: Values, stacks):
    """The stacks from size `outer` on, with what is kept of a layer."""
    # `first`: whether it is the first of a segment whatever comes behind it. One that
    # is not begins no segment, and writes where nobody reads.
    carried = [carry[k] for k in plan.carried]
    starts = list(map(packed, plan.starts, carried))
    done = []
    for level, stack in enumerate(stacks[:-1], outer):
        begins = first | ((after + 1) % plan.sizes[level] == 0)
        row = jnp.where(begins, _row_of(plan, level, after), plan.counts[level] - 1)
        done.append(_written(stack, starts, row))
    rows = [packed(v, values.read(v)) for v in plan.layer.instead]
    size = plan.sizes[-1]
    return [*done, _written(stacks[-1], rows, size - 1 - after % size)]


def _written(stack: list, values: list, row) -> list:
    write = lambda rows, x: lax.dynamic_update_index_in_dim(rows, x, row, 0)
    return list(map(write, stack, values))


def _read(variables, stack: list, row) -> dict[Any, Any]:
    rows = (lax.dynamic_index_in_dim(x, row, 0, keepdims=False) for x in stack)
    return {v: unpacked(v, x) for v, x in zip(variables, rows, strict=True)}
