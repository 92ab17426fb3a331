"""Residuals that the backward scan makes itself for the first layers, and reads for
the others.

Between a plan that keeps much and one that computes much lies one for each number of
layers. The scans stay whole: the forward one writes the stacks of the last layers into
its carry, and in the backward one a `cond` on the layer's number reads or computes.
(On a GPU the host waits for its predicate once a layer.)
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxmem import _compat, _jaxpr
from jaxmem.ir.graph import Values
from jaxmem.ir.scans import scan_like, split
from jaxmem.scheduling.recompute.minimum_cut import needed
from jaxmem.scheduling.recompute.residuals import (
    Given,
    Remake,
    packed,
    rebuilt,
    unpacked,
)


def remake_part(closed, plan: Remake):
    """The jaxpr with the residuals of the first `plan.turns` layers made again."""

    def backward(eqn, ins: list, given: Given, _, stacks: dict) -> list:
        return _run_backward(eqn, ins, plan, given, stacks)

    return rebuilt(closed, plan, _run_forward, backward)


def _dropped(plan: Remake) -> list[Any]:
    return list(dict.fromkeys(plan.slots.values()))


def _row(plan: Remake, j, early: bool):
    """Where layer `j` lies in a stack of the early layers, or of the late ones.

    A layer that has no place there is sent to a row that is written over, or not read.
    """
    return jnp.minimum(j, plan.turns) if early else jnp.maximum(j - plan.turns, 0)


def _empty(plan: Remake, v, early: bool):
    rows = plan.turns + 1 if early else plan.pair.length - plan.turns
    value = packed(v, jnp.zeros(v.aval.shape, v.aval.dtype)) if early else v.aval
    zeros = jnp.zeros((rows, *value.shape), value.dtype)
    return _compat.typed_as(zeros, v.aval)


def _run_forward(eqn, values: list, plan: Remake) -> tuple[list, dict[Any, Any]]:
    """Outputs of the forward scan, and the stacks of some of the layers."""
    consts, init, xs = split(eqn, values)
    body = plan.body
    parts = [*((v, True) for v in plan.kept), *((v, False) for v in _dropped(plan))]

    def step(carry, x):
        j, inner, stacks = carry
        inside = Values(body, body.inputs([*consts, *inner, *x]))
        outs = inside.all_outputs()
        new = []
        for (v, early), stack in zip(parts, stacks, strict=True):
            value = inside.read(v)
            value = packed(v, value) if early else value
            at = _row(plan, j, early)
            new.append(lax.dynamic_update_index_in_dim(stack, value, at, 0))
        return (j + 1, outs[: len(init)], new), outs[len(init) :]

    start = jnp.int32(0), init, [_empty(plan, *part) for part in parts]
    (_, ends, stacks), ys = scan_like(eqn, step, start, xs)
    made = zip(parts, stacks, strict=True)
    return [*ends, *ys], {v: stack for (v, _), stack in made}


def _run_backward(eqn, values: list, plan: Remake, weights, stacks) -> list:
    consts, init, xs = split(eqn, values)
    dropped = _dropped(plan)

    def step(inner, turn):
        j, x, now = (
            turn[0],
            dict(turn[1]),
            dict(zip(weights.slices, turn[2], strict=True)),
        )
        known = {v: x[slot] for slot, v in plan.stays.items()}

        def read() -> Sequence[Any]:
            at = _row(plan, j, early=False)
            return [_at(stacks[v], at) for v in dropped]

        def again() -> Sequence[Any]:
            at = _row(plan, j, early=True)
            rows = {v: unpacked(v, _at(stacks[v], at)) for v in plan.kept}
            values = Values(plan.body, {**weights.whole, **known, **now, **rows})
            for i in needed(plan.body, plan.wanted, plan.known):
                values.evaluate(i)
            return [values.read(v) for v in dropped]

        made = dict(zip(dropped, lax.cond(j < plan.turns, again, read), strict=True))
        x |= {slot: made[v] for slot, v in plan.slots.items()}
        args = [*consts, *inner, *(x[i] for i in range(len(xs)))]
        outs = _jaxpr.evaluate(eqn.params["jaxpr"], args)
        return outs[: len(init)], outs[len(init) :]

    stays = {i: x for i, x in enumerate(xs) if i not in plan.slots}
    numbers = jnp.arange(plan.pair.length, dtype=jnp.int32)
    if not eqn.params["reverse"]:  # the forward scan runs from the end
        numbers = numbers[::-1]
    turns = numbers, stays, list(weights.slices.values())
    ends, ys = scan_like(eqn, step, init, turns)
    return [*ends, *ys]


def _at(stack, j):
    return lax.dynamic_index_in_dim(stack, j, 0, keepdims=False)
