"""Grids of attention's kernels on a TPU: which blocks are visited, in which order."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention import inputs as common
from pallas_kernels.attention.tpu.blocks import LEAST_VMEM, Scalars, TpuCase

ZERO = np.int32(0)  # a plain 0 would be an int64 where x64 is enabled


def visited(case: TpuCase, scalars: Scalars, at):
    """Whether the block of queries visits the block of keys at this point."""
    first, last = visited_keys(case, scalars, at.b, at.i)
    inside = (first <= at.j) & (at.j <= last)
    if not case.segments:
        return inside
    q, kv = _segments(case, scalars, at)
    meet = (q[0] <= kv[1]) & (kv[0] <= q[1])
    return inside & (meet | _misses(case, scalars, at.b, at.i))


def for_visited(case: TpuCase, scalars: Scalars, at, run: Callable) -> None:
    """`run(whole)` if the block is visited.

    `whole`, a bool, is whether each of its queries sees each of its keys: such a block
    takes no mask, and most blocks are such.
    """
    inside, whole = visited(case, scalars, at), _wholly_seen(case, scalars, at)
    if whole is None:
        pl.when(inside)(lambda: run(True))
        return
    pl.when(inside & whole)(lambda: run(True))
    pl.when(inside & ~whole)(lambda: run(False))


def _wholly_seen(case: TpuCase, scalars: Scalars, at):
    """Whether all queries of the block see all of its keys; None if all blocks' do."""
    # All but a mask, which `LogitsBlock` reads from the bias.
    sizes = case.sizes
    t, s = at.i * sizes.block_q, at.j * sizes.block_kv
    queries, keys = (t, t + sizes.block_q - 1), (s, s + sizes.block_kv - 1)
    seen = [common.all_seen(case.rules, queries, keys)]
    if case.q_len:
        seen.append(queries[1] < scalars.q_len[at.b])
    elif sizes.queries % sizes.block_q:
        seen.append(queries[1] < sizes.queries)
    if case.kv_len:
        seen.append(keys[1] < scalars.kv_len[at.b])
    if sizes.keys % sizes.block_kv:
        seen.append(keys[1] < sizes.keys)
    if case.segments:
        q, kv = _segments(case, scalars, at)
        seen += [q[0] == q[1], kv[0] == kv[1], q[0] == kv[0]]
    return common.all_of(x for x in seen if x is not None)


def _segments(case: TpuCase, scalars: Scalars, at):
    """The lowest and the highest segment of the queries, and those of the keys."""
    q = 2 * (at.b * case.sizes.q_blocks + at.i)
    kv = 2 * (at.b * case.sizes.kv_blocks + at.j)
    return tuple(
        (spans[place], spans[place + 1])
        for spans, place in ((scalars.q_spans, q), (scalars.kv_spans, kv))
    )


def visited_keys(case: TpuCase, scalars: Scalars, b, i):
    """(first, last) block of keys, by position, that block i of queries visits."""
    sizes, start = case.sizes, i * case.sizes.block_q
    end = jnp.minimum(start + sizes.block_q, sizes.queries) - 1
    low, high = common.keys_seen(case.rules, start, end, sizes.keys, scalars.kv_len[b])
    low, high = _blocks(low, high, sizes.block_kv)
    low, high = _all_if_missing(case, scalars, b, i, low, high, sizes.kv_blocks)
    return low, jnp.where(start < scalars.q_len[b], high, low - 1)


def _all_if_missing(case: TpuCase, scalars: Scalars, b, i, low, high, blocks: int):
    if scalars.misses.shape == (1,):
        return low, high
    misses = _misses(case, scalars, b, i)
    return jnp.where(misses, ZERO, low), jnp.where(misses, np.int32(blocks - 1), high)


def _misses(case: TpuCase, scalars: Scalars, b, i):
    return scalars.misses[b * (case.sizes.q_blocks + 1) + i] != 0


def visited_queries(case: TpuCase, scalars: Scalars, b, j):
    """(first, last) block of queries that block j of keys may be visited by."""
    sizes, start = case.sizes, j * case.sizes.block_kv
    end = jnp.minimum(start + sizes.block_kv, sizes.keys) - 1
    q_len = scalars.q_len[b]
    low, high = common.queries_seeing(case.rules, start, end, sizes.queries, q_len)
    low, high = _blocks(low, high, sizes.block_q)
    n = sizes.q_blocks
    return _all_if_missing(case, scalars, b, n, low, high, n)


def _blocks(low, high, size: int):
    """Blocks of positions low..high, which may be none."""
    none = low > high
    low = jax.lax.div(jnp.maximum(low, 0), jnp.int32(size))
    high = jax.lax.div(jnp.maximum(high, 0), jnp.int32(size))
    return low, jnp.where(none, low - 1, high)


def nearest(i, low, high, blocks: int):
    """Block i, or the one next to it that is visited: what is there needs no fetch."""
    i = jnp.minimum(jnp.maximum(i, low), high)
    return jnp.minimum(jnp.maximum(i, 0), blocks - 1)


# -- grids


class GridPoint(NamedTuple):
    """A point of the grid: batch, pack of query heads and of key heads, and blocks."""

    b: Any
    pack: Any
    i: Any
    kv_pack: Any
    j: Any


class GridOrder(NamedTuple):
    """A grid: its size, the point that an index is, and what is fetched there."""

    grid: tuple[int, ...]
    at: Callable[..., GridPoint]
    fetched: Callable[..., GridPoint]


def queries_outside(case: TpuCase) -> GridOrder:
    """For each block of queries the blocks of keys in sequence."""
    sizes = case.sizes

    def at(b, pack, i, j):
        return GridPoint(b, pack, i, jax.lax.div(pack, jnp.int32(sizes.group)), j)

    def fetched(b, pack, i, j, *refs):
        low, high = visited_keys(case, Scalars(*refs), b, i)
        return at(b, pack, i, nearest(j, low, high, sizes.kv_blocks))

    grid = sizes.batch, sizes.packs, sizes.q_blocks, sizes.kv_blocks
    return GridOrder(grid, at, fetched)


def keys_outside(case: TpuCase) -> GridOrder:
    """For each block of keys the blocks of queries, of all heads that share them."""
    sizes = case.sizes

    def at(b, kv_pack, j, n):
        pack = kv_pack * sizes.group + jax.lax.div(n, jnp.int32(sizes.q_blocks))
        return GridPoint(b, pack, jax.lax.rem(n, jnp.int32(sizes.q_blocks)), kv_pack, j)

    def fetched(b, kv_pack, j, n, *refs):
        low, high = visited_queries(case, Scalars(*refs), b, j)
        point = at(b, kv_pack, j, n)
        return point._replace(i=nearest(point.i, low, high, sizes.q_blocks))

    grid = sizes.batch, sizes.kv_packs, sizes.kv_blocks, sizes.group * sizes.q_blocks
    return GridOrder(grid, at, fetched)


def _block_of(name: str, case: TpuCase, shape) -> tuple[tuple[int, ...], Callable]:
    """The shape of a block of the array of this name, and its index at a point."""
    sizes = case.sizes
    if name in ("q", "g", "dq", "o"):
        return (1, sizes.block_q, sizes.width), lambda at: (at.b, at.i, at.pack)
    if name in ("k", "v", "dk", "dv"):
        return (1, sizes.block_kv, sizes.width), lambda at: (at.b, at.j, at.kv_pack)
    if name == "dq_of_group":
        block = 1, sizes.q_blocks * sizes.block_q, sizes.group * sizes.width
        return block, lambda at: (at.b, ZERO, at.kv_pack)
    if name in ("top", "log_total", "delta"):
        return (1, 1, sizes.pack, sizes.block_q), lambda at: (at.b, at.pack, ZERO, at.i)
    if name == "q_segments":
        return (1, 1, sizes.block_q), lambda at: (at.b, ZERO, at.i)
    if name == "kv_segments":
        return (1, 1, sizes.block_kv), lambda at: (at.b, ZERO, at.j)
    return _block_of_bias(name, case, shape)


def _block_of_bias(name: str, case: TpuCase, shape):
    """Of "bias" and "mask", by layout, and "dbias"."""
    batched, by_head = shape[0] > 1, shape[1] > 1
    _, _, axes = name.partition("_of_")
    t, s = {
        "": (case.sizes.block_q, case.sizes.block_kv),
        "keys": (1, case.sizes.block_kv),
        "queries": (1, case.sizes.block_q),
    }[axes]

    def index(at):
        lead = at.b if batched else ZERO, at.pack if by_head else ZERO
        last = at.i if axes == "queries" else at.j
        return *lead, ZERO if axes else at.i, last

    return (1, case.sizes.pack if by_head else 1, t, s), index


def _read(name: str, case: TpuCase, order: GridOrder, shape) -> pl.BlockSpec:
    block, index = _block_of(name, case, shape)
    return pl.BlockSpec(block, lambda *grid: index(order.fetched(*grid)))


def _written(name: str, case: TpuCase, order: GridOrder, shape) -> pl.BlockSpec:
    block, index = _block_of(name, case, shape)
    axes = len(order.grid)
    return pl.BlockSpec(block, lambda *grid: index(order.at(*grid[:axes])))


def call(
    name: str, kernel, case: TpuCase, order: GridOrder, scalars, ins, outs, scratch
):
    """`kernel(at, scalars, ins, outs, scratch)` at each point of the grid."""

    def body(*refs):
        at = order.at(*(pl.program_id(axis) for axis in range(4)))
        ins, outs, *scratch = refs[len(scalars) :]
        kernel(case, at, Scalars(*refs[: len(scalars)]), ins, outs, scratch)

    specs = [
        {n: spec(n, case, order, x.shape) for n, x in arrays.items()}
        for spec, arrays in ((_read, ins), (_written, outs))
    ]
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=order.grid,
            in_specs=specs[:1],
            out_specs=specs[1],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=outs,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=case.vmem if "dq_of_group" in outs else LEAST_VMEM,
        ),
        cost_estimate=_cost(case, ins, outs),
        name=name,
    )(*scalars, ins)


_PRODUCTS = {"o": 1, "dq": 1, "dq_of_group": 1, "dk": 1, "dv": 1, "delta": 1}


def _cost(case: TpuCase, ins, outs) -> pl.CostEstimate:
    """A product for the logits, one for each sum, one for their gradient."""
    arrays = ins | outs
    sizes, products = case.sizes, 1 + sum(_PRODUCTS.get(name, 0) for name in arrays)
    logits = sizes.batch * sizes.heads * sizes.queries * sizes.keys
    logits = logits // 2 if case.rules.causal else logits
    return pl.CostEstimate(
        flops=2 * products * logits * sizes.head,
        transcendentals=logits,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays.values()),
    )
