"""A forward scan that keeps a TPU from casting all its parameters at once.

XLA for TPU moves the cast of a slice of something that a loop does not change out of
the loop: bf16 copies of all layers are made before the first. Something that the loop
changes stays. So parameters that the backward scan will overwrite anyway travel in the
forward scan's carry, and on TPU each slice is written back as it was read. Elsewhere
nothing is written, and the carry is what the compiler makes of any loop's input.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxmem.ir import jaxprs
from jaxmem.ir.scans import LARGE, is_var, scan_like, size_of, split, xs_of


def narrowed(eqn, candidates: Sequence[Any]) -> list[int]:
    """Which xs of a scan are among `candidates`, large, and narrowed in its body."""
    body = jaxprs.split(eqn.params["jaxpr"])[0]
    inner = split(eqn, body.invars)[2]
    return [
        i
        for i, v in enumerate(xs_of(eqn))
        if is_var(v)
        and v in candidates
        and size_of(v) >= LARGE
        and is_narrowed(body, inner[i])
    ]


def is_narrowed(body, v) -> bool:
    """Whether a variable is cast to fewer bytes, here or in a function it goes into."""
    for eqn in (e for e in body.eqns if v in e.invars):
        if eqn.primitive.name == "convert_element_type":
            if jnp.dtype(eqn.params["new_dtype"]).itemsize < v.aval.dtype.itemsize:
                return True
        for inner in (jaxprs.split(b)[0] for b in jaxprs.bodies(eqn)):
            if len(inner.invars) == len(eqn.invars):
                if is_narrowed(inner, inner.invars[eqn.invars.index(v)]):
                    return True
    return False


def scan_with_write_back(
    eqn, values: Sequence[Any], slots: Sequence[int]
) -> tuple[list[Any], list[Any]]:
    """The scan's outputs, and the arrays at `slots` of its xs as it leaves them."""
    consts, init, xs = split(eqn, values)
    reverse, length = eqn.params["reverse"], eqn.params["length"]

    def step(carry, item):
        j, inner, stacks = carry
        x = dict(item)
        for slot, stack in zip(slots, stacks, strict=True):
            x[slot] = lax.dynamic_index_in_dim(stack, j, 0, keepdims=False)
        args = [*consts, *inner, *(x[i] for i in range(len(xs)))]
        outs = jaxprs.evaluate(eqn.params["jaxpr"], args)
        stacks = [_written(s, x[i], j) for i, s in zip(slots, stacks, strict=True)]
        after = j + (-1 if reverse else 1), outs[: len(init)], stacks
        return after, outs[len(init) :]

    start = jnp.int32(length - 1 if reverse else 0)
    rest = {i: x for i, x in enumerate(xs) if i not in slots}
    carry = start, init, [xs[i] for i in slots]
    (_, ends, stacks), ys = scan_like(eqn, step, carry, rest)
    return [*ends, *ys], stacks


def _written(stack, layer, j):
    def write(stack, layer, j):
        layer = lax.optimization_barrier(layer)  # else reading and writing cancel out
        return lax.dynamic_update_index_in_dim(stack, layer, j, 0)

    keep = lambda stack, layer, j: stack
    return lax.platform_dependent(stack, layer, j, tpu=write, default=keep)
