"""The loop that runs a step on some examples at a time, and adds up the gradients.

Where the examples are sharded over devices, each works on its own, and sums are taken
over the devices after the loop: else XLA would do that in every iteration.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import _compat
from jaxmem.ir import graph as graphs
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.placements import Partial, Placement, Shard, axes_of
from jaxmem.ir.scans import is_var
from jaxmem.scheduling.tiling.batch import Batch
from jaxmem.scheduling.tiling.gathered import held_whole
from jaxmem.scheduling.tiling.part_values import of_block
from jaxmem.scheduling.tiling.parts_loop import PartsLoop, around
from jaxmem.scheduling.tiling.shard_sums import combined
from jaxmem.scheduling.tiling.sums import neutral

SCOPE = "jaxmem.examples"  # of the loop over parts of the examples


def in_parts(closed, batch: Batch):
    """The closed jaxpr of a step with its region as one loop over parts."""
    inside, after = batch.placed.keys(), batch.after.keys()
    run = lambda args: around(batch.graph, args, inside, after, partial(_looped, batch))
    return _compat.without_dead_code(jaxprs.retrace(closed, run))


def is_batch_loop(eqn) -> bool:
    """Whether a scan is the loop over parts of the examples."""
    is_scan = eqn is not None and primitives.is_scan(eqn)
    return is_scan and SCOPE in _compat.name_stack(eqn)


def _looped(batch: Batch, outside: graphs.Values) -> dict[Any, Any]:
    sums, cut = batch.frontier()
    axes = {v: p.axis for v in cut if isinstance(p := batch.of[v], Shard)}
    once = _of_no_example(batch, outside)
    if batch.shards > 1:
        env = outside.env | _gathered(batch, outside)
        outside = replace(outside, env=env, done={*outside.done})
    about = batch, outside, batch.in_part()
    sharded = batch.shards > 1
    run = (
        partial(_sharded_part, *about) if sharded else partial(_part, *about, slices={})
    )

    def part_of(totals, part):
        terms, made = run(part)
        new = [
            getattr(lax, _op(batch, v))(t, x.astype(t.dtype))
            for t, v, x in zip(totals, sums, terms, strict=True)
        ]
        return new, dict(zip(cut, made, strict=True))

    loop = PartsLoop(axes, batch.parts)
    totals, found = loop.run(SCOPE, _empty_sums(batch), part_of)
    pairs = zip(sums, totals, strict=True)
    return found | once | {v: _whole_sum(batch, v, total) for v, total in pairs}


def _of_no_example(batch: Batch, outside: graphs.Values) -> dict[Any, Any]:
    """What no example has part in, as a counter that the layers' scan advances.

    It is computed outside of the loop: of the scan that makes it the rest is dead code.
    """
    values = replace(outside, env={**outside.env}, done={*outside.done})
    return {v: values.read(v) for v in batch.of_no_example()}


def _op(batch: Batch, v) -> str:
    """What combines the terms of a sum."""
    placement = batch.of[v]
    assert isinstance(placement, Partial), v
    return placement.op


def _whole_sum(batch: Batch, v, total):
    """A sum after the loop; over the devices in the type of the step's own."""
    total = total.astype(v.aval.dtype)
    return combined(_op(batch, v), total) if batch.shards > 1 else total


def _part(
    batch: Batch, outside: graphs.Values, in_part: set[int], part, slices
) -> tuple[list[Any], list[Any]]:
    """What a part of the examples gives: terms of sums, and arrays that are cut."""
    blocks = batch.parts.blocks
    whole = _whole_in_part(batch, outside, in_part)
    values = of_block(blocks, part, whole, batch.zeros, slices)
    for i in sorted(batch.placed):
        values.run(batch.graph.eqns[i], batch.placed[i])
    sums, cut = ([values.env[v, batch.of[v]] for v in vs] for vs in batch.frontier())
    return sums, cut


def _sharded_part(
    batch: Batch, outside: graphs.Values, in_part: set[int], part
) -> tuple[list[Any], list[Any]]:
    """The same of every shard of the examples: each device works on its own.

    Terms have an axis for the shards in front; they are summed over it after the loop.
    """
    made = batch.graph.maker
    taken = ((v, p.axis) for v, p in _from_outside(batch) if isinstance(p, Shard))
    axes = {v: axis for v, axis in taken if made.get(v) not in in_part}
    slices = [batch.parts.take_each(outside.read(v), a, part) for v, a in axes.items()]

    def of_shard(shard, *slices):
        block = shard * batch.n + part
        forms = ((v, Shard(axis)) for v, axis in axes.items())
        own = dict(zip(forms, slices, strict=True))
        return _part(batch, outside, in_part, block, own)

    sums, cut = batch.frontier()
    terms, parts = jax.vmap(
        of_shard,
        in_axes=(0, *axes.values()),
        out_axes=([0] * len(sums), [*axes_of(batch.of[v] for v in cut)]),
        spmd_axis_name=batch.names,
    )(jnp.arange(batch.shards, dtype=jnp.int32), *slices)
    return terms, parts


def _from_outside(batch: Batch) -> Iterator[tuple[Any, Placement]]:
    """What the loop reads that it does not make, and what a part has of it."""
    graph = batch.graph
    for i in sorted(batch.placed):
        ins = zip(graph.eqns[i].invars, batch.placed[i].ins, strict=True)
        for v, placement in ins:
            if is_var(v) and graph.maker.get(v) not in batch.placed:
                yield v, placement


def _gathered(batch: Batch, outside: graphs.Values) -> dict[Any, Any]:
    """What every part reads whole, and is sharded as the examples are: on all devices.

    XLA would gather it in every iteration.
    """
    apart = (
        (v, axis, names)
        for v, placement in _from_outside(batch)
        for axis, names in enumerate(batch.shardings.of.get(v, ()))
        if not isinstance(placement, Shard) and {*names} & {*batch.names}
    )
    return held_whole(apart, batch.shardings, outside.read)


def _whole_in_part(batch: Batch, outside: graphs.Values, in_part: set[int]) -> Callable:
    """Gives whole values: those before the loop, and what is cheap anew."""
    graph, own = batch.graph, {}

    def whole(v) -> Any:
        if graph.maker.get(v) not in in_part:
            return outside.read(v)
        if v not in own:
            eqn = graph.eqns[graph.maker[v]]
            args = [whole(a) if is_var(a) else a.val for a in eqn.invars]
            own.update(zip(eqn.outvars, _compat.bind(eqn, args), strict=True))
        return own[v]

    return whole


def sum_bytes(batch: Batch) -> int:
    """Bytes of what the parts add up, on each device."""
    avals = jax.eval_shape(lambda: _empty_sums(batch))
    return sum(x.size * x.dtype.itemsize for x in avals) // batch.shards


def _empty_sums(batch: Batch) -> list[Any]:
    """What the parts add to at first; where they are sharded, one for each shard."""
    sums, _ = batch.frontier()
    first = [neutral(_op(batch, v), v.aval) for v in sums]
    if batch.shards == 1:
        return first
    return [jnp.broadcast_to(x, (batch.shards, *x.shape)) for x in first]
