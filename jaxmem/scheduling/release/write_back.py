"""Scans and loops that write parameters back as they were, for the sake of TPUs.

XLA for TPU moves the cast of a slice of what a loop does not change out of the loop:
bf16 copies of all layers are made before the first. What the loop changes stays, so
parameters travel in the carry, and on TPU each slice is written back as it was read.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import JaxprGraph, Values, done_otherwise
from jaxmem.ir.scans import (
    LARGE,
    barrier,
    is_var,
    run_body,
    scan_like,
    size_of,
    split,
    xs_of,
)


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
        if primitives.is_cast(eqn):
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
        carry, rows = run_body(eqn, consts, inner, [x[i] for i in range(len(xs))])
        stacks = [_written(s, x[i], j) for i, s in zip(slots, stacks, strict=True)]
        return (j + (-1 if reverse else 1), carry, stacks), rows

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


def carried(closed, aliases: Mapping[int, int]):
    """The jaxpr with those parameters in the carry of its loops."""
    # `aliases`: position of an output -> of the input in whose memory it will be. Only
    # such an input is carried: of others the loop would need a copy to write into.
    graph = JaxprGraph(closed)
    inputs = {graph.arguments[i] for i in aliases.values()}
    loops = {}
    for i, eqn in enumerate(graph.eqns):
        if primitives.is_scan(eqn) and (places := _places(eqn, inputs)):
            loops[i] = partial(_run_loop, eqn, places)
    return done_otherwise(closed, graph, loops) if loops else closed


def _places(eqn, inputs: Collection[Any]) -> list[int]:
    """Which constants of a loop are such inputs, large, and cast in its body."""
    body = jaxprs.split(eqn.params["jaxpr"])[0]
    inner = split(eqn, body.invars)[0]
    cast = _cast_in_scans(body, inner)
    cast |= {v for v in inner if size_of(v) >= LARGE and is_narrowed(body, v)}
    return [
        k
        for k, v in enumerate(split(eqn, eqn.invars)[0])
        if is_var(v) and v in inputs and inner[k] in cast
    ]


def _cast_in_scans(body, variables: Sequence[Any]) -> set[Any]:
    return {
        xs_of(eqn)[slot]
        for eqn in body.eqns
        if primitives.is_scan(eqn)
        for slot in narrowed(eqn, variables)
    }


def _run_loop(eqn, places: Sequence[int], values: Values) -> list[Any]:
    """The loop's outputs; `values` has the parameters as the loop leaves them."""
    consts, init, xs = split(eqn, [values.read(v) for v in eqn.invars])
    body = JaxprGraph(eqn.params["jaxpr"])
    inner = split(eqn, body.arguments)[0]
    handed = [inner[k] for k in places]

    def step(carry, x):
        carry, stacks = carry
        now = dict(zip(places, _changed(stacks), strict=True))
        args = [now.get(k, c) for k, c in enumerate(consts)]
        state = _Handing(body, body.inputs([*args, *carry, *x]), handed=handed)
        outs = state.all_outputs()
        stacks = [state.env[v] for v in handed]
        return (outs[: len(init)], stacks), outs[len(init) :]

    start = init, [consts[k] for k in places]
    (ends, stacks), ys = scan_like(eqn, step, start, xs)
    outside = split(eqn, eqn.invars)[0]
    values.env.update(zip((outside[k] for k in places), stacks, strict=True))
    return [*ends, *ys]


def _changed(stacks: list[Any]) -> list[Any]:
    """The same values; a compiler for TPU cannot tell that the loop keeps them."""
    same = lambda *stacks: stacks
    return list(lax.platform_dependent(*stacks, tpu=_behind_barrier, default=same))


def _behind_barrier(*stacks):
    return tuple(barrier(stacks))


@dataclass
class _Handing(Values):
    """Values of a loop's body; each scan leaves parameters that the next one reads."""

    handed: Sequence[Any] = field(kw_only=True)

    def apply(self, i: int) -> None:
        eqn = self.graph.eqns[i]
        slots = narrowed(eqn, self.handed) if primitives.is_scan(eqn) else []
        if not slots:
            super().apply(i)
            return
        values = [self.read(v) for v in eqn.invars]
        outs, stacks = scan_with_write_back(eqn, values, slots)
        self.put(i, outs)
        self.env.update(zip([xs_of(eqn)[k] for k in slots], stacks, strict=True))
