"""Residuals that the backward scan recomputes in the first layers only.

Between a choice that keeps much and one that recomputes much lies one for each number
of layers. The scans stay whole: the forward scan writes the stacks of the last layers
into its carry, and in the backward scan a `cond` on the layer's number reads a residual
or recomputes it. (On a GPU the host waits for its predicate once a layer.)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from jaxmem import _compat
from jaxmem.ir.graph import Values
from jaxmem.ir.scans import run_body, scan_like, split
from jaxmem.scheduling._pass import Level
from jaxmem.scheduling.recompute.minimum_cut import needed, price_at
from jaxmem.scheduling.recompute.pair_rewrite import (
    Given,
    PairRewrite,
    packed,
    rebuilt,
    unpacked,
)
from jaxmem.scheduling.recompute.recomputation import Recomputation
from jaxmem.scheduling.recompute.residuals import rewrites


@dataclass(frozen=True)
class FirstLayers:
    """What the backward scans recompute in the first layers."""

    name: ClassVar[str] = "first_layers"
    # as `Recompute.rate`, of these layers; None: nothing more than in all layers
    rate: float | None = None
    fraction: float = 0.0  # how many of the layers these are


class RecomputeFirstLayers(Recomputation[FirstLayers, PairRewrite]):
    """In the first layers of a scan more is recomputed than in the others."""

    config = FirstLayers

    def analyse(self, level: Level, config: FirstLayers) -> Iterator[PairRewrite]:
        if config.rate is None:
            return iter(())
        price = price_at(config.rate, level.target)
        return rewrites(level.jaxpr, price, config.fraction, given=level.spreads)

    def apply(self, level: Level, rewrite: PairRewrite):
        return _with_recomputation(level.jaxpr, rewrite)


def _with_recomputation(closed, plan: PairRewrite):
    """The jaxpr with residuals of the first `plan.layers` layers recomputed."""

    def backward(eqn, ins: list, given: Given, _, stacks: dict) -> list:
        return _run_backward(eqn, ins, plan, given, stacks)

    return rebuilt(closed, plan, _run_forward, backward)


def _dropped(plan: PairRewrite) -> list[Any]:
    return list(dict.fromkeys(plan.slots.values()))


def _row(plan: PairRewrite, j, early: bool):
    """Where layer `j` lies in a stack of the early layers, or of the late ones."""
    # A layer that has no place there is sent to a row that is written over, or not
    # read.
    return jnp.minimum(j, plan.layers) if early else jnp.maximum(j - plan.layers, 0)


def _empty(plan: PairRewrite, v, early: bool):
    rows = plan.layers + 1 if early else plan.pair.length - plan.layers
    value = packed(v, jnp.zeros(v.aval.shape, v.aval.dtype)) if early else v.aval
    zeros = jnp.zeros((rows, *value.shape), value.dtype)
    return _compat.typed_as(zeros, v.aval)


def _run_forward(eqn, values: list, plan: PairRewrite) -> tuple[list, dict[Any, Any]]:
    """Outputs of the forward scan, and the stacks of some of the layers."""
    consts, init, xs = split(eqn, values)
    body = plan.body
    parts = [*((v, True) for v in plan.instead), *((v, False) for v in _dropped(plan))]

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


def _run_backward(eqn, values: list, plan: PairRewrite, weights, stacks) -> list:
    consts, init, xs = split(eqn, values)
    dropped = _dropped(plan)

    def step(inner, item):
        j, x = item[0], dict(item[1])
        now = dict(zip(weights.slices, item[2], strict=True))
        known = {v: x[slot] for slot, v in plan.stays.items()}

        def read() -> Sequence[Any]:
            at = _row(plan, j, early=False)
            return [_at(stacks[v], at) for v in dropped]

        def recompute() -> Sequence[Any]:
            at = _row(plan, j, early=True)
            rows = {v: unpacked(v, _at(stacks[v], at)) for v in plan.instead}
            values = Values(plan.body, {**weights.whole, **known, **now, **rows})
            for i in needed(plan.body, plan.wanted, plan.known):
                values.evaluate(i)
            return [values.read(v) for v in dropped]

        made = dict(
            zip(dropped, lax.cond(j < plan.layers, recompute, read), strict=True)
        )
        x |= {slot: made[v] for slot, v in plan.slots.items()}
        return run_body(eqn, consts, inner, [x[i] for i in range(len(xs))])

    stays = {i: x for i, x in enumerate(xs) if i not in plan.slots}
    numbers = jnp.arange(plan.pair.length, dtype=jnp.int32)
    if not eqn.params["reverse"]:  # the forward scan runs from the end
        numbers = numbers[::-1]
    items = numbers, stays, list(weights.slices.values())
    ends, ys = scan_like(eqn, step, init, items)
    return [*ends, *ys]


def _at(stack, j):
    return lax.dynamic_index_in_dim(stack, j, 0, keepdims=False)
