"""Attention's forward pass on a TPU: for each block of queries all blocks of keys."""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.arrays import dot, like
from pallas_kernels.attention.inputs import MASKED, Inputs, Rules
from pallas_kernels.attention.tpu import blocks as packing
from pallas_kernels.attention.tpu.blocks import Scalars, TpuCase
from pallas_kernels.attention.tpu.grid import (
    GridPoint,
    call,
    for_visited,
    queries_outside,
)
from pallas_kernels.attention.tpu.logits import LogitsBlock, rows_where, where


def _kernel(case: TpuCase, at: GridPoint, scalars: Scalars, ins, outs, scratch) -> None:
    @pl.when(at.j == 0)
    def _():
        for ref, start in zip(scratch, (-jnp.inf, 0.0, 0.0), strict=True):
            ref[...] = jnp.full(ref.shape, start, jnp.float32)

    def add(whole: bool) -> None:
        _add_keys(LogitsBlock(case, scalars, at, ins, whole), *scratch)

    for_visited(case, scalars, at, add)

    @pl.when(at.j == case.sizes.kv_blocks - 1)
    def _():
        _finish(LogitsBlock(case, scalars, at, ins), outs, *scratch)


def _add_keys(block: LogitsBlock, tops, totals, sums) -> None:
    """Adds a block of keys to the running maximum, sum and sum of values."""
    values = rows_where(block.real_keys(), block.ins["v"][0]).T
    for n in range(block.case.sizes.pack):
        logits, _ = block.logits(n)
        before, rows = tops[n], block.rows(n)
        top = jnp.maximum(before, logits.max(axis=0, keepdims=True))
        base = where(top > -jnp.inf, top)  # a bias may hide a whole block
        p, shrink = jnp.exp(logits - base), jnp.exp(before - base)
        tops[n] = top
        totals[n] = shrink * totals[n] + p.sum(axis=0, keepdims=True)
        p = block.dropout(n)(p).astype(values.dtype)
        sums[rows] = shrink * sums[rows] + dot(values[rows], p, (1, 0))


def _finish(block: LogitsBlock, outs, tops, totals, sums) -> None:
    """Writes output and row statistics of a block of queries."""
    for n in range(block.case.sizes.pack):
        rows, total = block.rows(n), totals[n]
        values = sums[rows] / (total * (1.0 - block.case.rules.rate))
        stats = tops[n], jnp.log(total)
        if block.q_len is not None:
            live = block.t < block.q_len
            values = where(live, values)
            stats = where(live, stats[0], MASKED), where(live, stats[1])
        sums[rows] = values
        outs["top"][0, 0, n : n + 1], outs["log_total"][0, 0, n : n + 1] = stats
    outs["o"][0] = sums[...].T.astype(outs["o"].dtype)


def forward(
    inputs: Inputs,
    rules: Rules,
    *,
    blocks: tuple[int | None, int | None] = (None, None),
):
    """(o, row maximum, logarithm of the row sum): see the package `attention`.

    `blocks` are multiples of 128; None for 512, or for what there is room for.
    """
    q, k, v, biases = inputs.q, inputs.k, inputs.v, packing.biases_of(inputs)
    case = packing.case_for(rules, inputs, biases, blocks)
    sizes, order = case.sizes, queries_outside(case)
    ins = {"q": packing.lanes(q, sizes)}
    ins |= {"k": packing.kv_lanes(k, sizes), "v": packing.kv_lanes(v, sizes)}
    ins |= packing.optional(sizes, biases, inputs)
    outs = {"o": like(q, ins["q"].shape, q.dtype)}
    for name in ("top", "log_total"):
        outs[name] = like(q, sizes.stats, jnp.float32)
    rows = sizes.pack, 1, sizes.block_q
    scratch = rows, rows, (sizes.width, sizes.block_q)
    name, scalars = "attention_forward", packing.scalars_for(case, inputs)
    got = call(name, _kernel, case, order, scalars, ins, outs, scratch)
    stats = (got[n].reshape(q.shape[0], -1, q.shape[1]) for n in ("top", "log_total"))
    return packing.from_lanes(got["o"], q.shape[2], q.shape[3]), *stats
