"""The gradient of a bias on a TPU.

A block of the gradient is of queries and keys, or of keys alone, as the bias is. Those
that share it come one after another, along the last axis of the grid: sequences, packs
of heads, and blocks of queries where the bias is the same for all of them. Their
gradients of logits are summed on the chip, in float32 and in one order.

Limits: logits are computed once more, beside those for dq, dk and dv, in blocks that
are at most as large: a float32 sum takes 4 bytes a pair and head of a block.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.arrays import LANES, like
from pallas_kernels.attention.inputs import Inputs
from pallas_kernels.attention.tpu.blocks import (
    BlockSizes,
    Scalars,
    TpuCase,
    scalars_for,
)
from pallas_kernels.attention.tpu.gradients import factor, for_gradients
from pallas_kernels.attention.tpu.grid import (
    GridOrder,
    GridPoint,
    call,
    nearest,
    visited_keys,
    visited_queries,
)


def bytes_of_sums(bias, sizes: BlockSizes) -> int:
    """What the kernel needs on the chip: sums, and two buffers to leave by."""
    heads, logits = sizes.pack, sizes.block_q * sizes.block_kv
    whole = min(bias.shape[2:]) > 1
    return (4 + 2 * bias.dtype.itemsize) * heads * logits if whole else 0


def gradient_of_bias(case: TpuCase, inputs: Inputs, ins: dict[str, Any]):
    """In the shape and dtype of the bias; `ins` are the arrays of a backward pass."""
    bias, sizes = inputs.bias, case.sizes
    if bias.shape[3] == 1:
        return jnp.zeros_like(bias)  # which a softmax over keys does not depend on
    of_keys = bias.shape[2] == 1
    name = "dbias_of_keys" if of_keys else "dbias"
    outs = {name: like(ins["g"], bias.shape, bias.dtype)}
    heads = sizes.pack if bias.shape[1] > 1 else 1
    sums = heads, sizes.block_kv, LANES if of_keys else sizes.block_q
    order, scalars = _order(case, bias.shape), scalars_for(case, inputs)
    kernel = "attention_dbias", _kernel
    return call(*kernel, case, order, scalars, ins, outs, [sums])[name]


def _kernel(case: TpuCase, at: GridPoint, scalars: Scalars, ins, outs, scratch) -> None:
    (sums,), ((name, out),) = scratch, outs.items()
    step, of_keys = pl.program_id(3), name == "dbias_of_keys"

    @pl.when(step == 0)
    def _():
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    def add(_, ds, n: int) -> None:
        sums[min(n, sums.shape[0] - 1)] += _to_lanes(ds) if of_keys else ds

    for_gradients(case, at, scalars, ins, add)

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        for n in range(sums.shape[0]):
            total = sums[n].T * factor(case, "dbias")
            total = total.sum(axis=0, keepdims=True) if of_keys else total
            out[0, n] = total.astype(out.dtype)


def _to_lanes(ds):
    """[keys, queries] summed over queries, but for 128 of them."""
    parts = range(0, ds.shape[1], LANES)
    return sum((ds[:, x : x + LANES] for x in parts[1:]), ds[:, :LANES])


def _order(case: TpuCase, shape) -> GridOrder:
    """For each block of the bias those that share it, in sequence."""
    sizes, of_keys = case.sizes, shape[2] == 1
    sequences = sizes.batch // shape[0]
    packs = sizes.packs if shape[1] == 1 else 1
    own_packs = sizes.packs // packs
    rows, inside = (1, sizes.q_blocks) if of_keys else (sizes.q_blocks, 1)

    def at(lead, i, j, step):
        member, block = _divided(step, inside)
        # Of each sum one part is 0: an axis is the bias's own, or shared.
        b, pack = map(jnp.add, _divided(lead, own_packs), _divided(member, packs))
        kv_pack, _ = _divided(pack, sizes.group)
        return GridPoint(b, pack, i + block, kv_pack, j)

    def fetched(lead, i, j, step, *refs):
        scalars, point = Scalars(*refs), at(lead, i, j, step)
        if of_keys:
            low, high = visited_queries(case, scalars, point.b, point.j)
            return point._replace(i=nearest(point.i, low, high, sizes.q_blocks))
        low, high = visited_keys(case, scalars, point.b, point.i)
        near = nearest(point.j, low, high, sizes.kv_blocks)
        # Of those that share a block which they do not visit one is fetched, the first.
        first = at(lead, i, near, jnp.zeros_like(step))
        hidden, near = near != j, point._replace(j=near)
        both = zip(first, near, strict=True)
        return GridPoint(*(jnp.where(hidden, x, y) for x, y in both))

    grid = shape[0] * own_packs, rows, sizes.kv_blocks, sequences * packs * inside
    return GridOrder(grid, at, fetched)


def _divided(x, by: int):
    """Quotient and remainder, of int32."""
    return jax.lax.div(x, np.int32(by)), jax.lax.rem(x, np.int32(by))
