"""Attention in blocks of the batch and of the queries, in plain XLA.

Logits, probabilities and dropout's mask are recomputed in the backward pass, one block
at a time: 7 products where plain attention has 6 (Rabe and Staats 2021; Dao et al.,
"FlashAttention", 2022, section 3.1, for the backward pass from row statistics).
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxmem.ops.attention import block as block
from jaxmem.ops.attention.block import BlockPosition, Extras, Rules
from jaxmem.ops.common.blocks import BlockedAxis, BlockedOutput, blockwise, devices_of
from jaxmem.ops.common.lean import wide_dtype

# Below 1 % of a GPU's memory, and so much that launches are a small part of the time: a
# block of 16 MiB is read in 5 us on an H100, and its kernels start in 1.5.
BLOCK_LOGITS_BYTES = 64 * 2**20
# A matrix unit's rows: with fewer queries a product leaves most of it idle.
_LEAST_QUERIES = 16


@dataclass(frozen=True)
class AttentionBlocks:
    """The whole static part: what to compute and in which blocks."""

    rules: Rules
    rows: BlockedAxis
    queries: BlockedAxis


def _rows(batch: int, most: int, shards: int) -> int:
    """The largest divisor of the batch up to `most` that `shards` divides."""
    together = math.gcd(batch, shards)
    fits = [r for r in range(1, most + 1) if batch % r == 0 and r % together == 0]
    return max(fits, default=together)


def make_blocks(rules: Rules, q, k, block_size: int | None) -> AttentionBlocks:
    """Blocks whose float32 logits stay within the budget, for each device."""
    batch, length, heads, _ = q.shape
    shards = devices_of(q)
    budget = BLOCK_LOGITS_BYTES * math.gcd(batch, shards)
    query_bytes = max(1, heads * k.shape[1] * 4)
    least = _rows(batch, 1, shards)
    if block_size is None:
        most = max(budget // (query_bytes * least), _LEAST_QUERIES)
        block_size = length if most >= length else _even(length, most)
    block_size = max(1, min(block_size, length))
    rows = _rows(batch, max(1, budget // (query_bytes * block_size)), shards)
    return AttentionBlocks(
        rules, BlockedAxis(batch, rows, shards > 1), BlockedAxis(length, block_size)
    )


# Bytes accessed by TPU's cost analysis, forward and backward, 16 heads of 64, bfloat16:
# 0.9 times those of `jax.nn` in one block, 1.1 in 8, 1.9 in 64. Many blocks cost most,
# as each reads keys and values and adds to float32 sums of their gradients.
def _even(length: int, most: int) -> int:
    """A block of at most `most`, in tens of 16, that leaves the last nearly full."""
    most -= most % _LEAST_QUERIES
    if length % most == 0:
        return most
    even = -(-length // -(-length // most))
    return -(-even // _LEAST_QUERIES) * _LEAST_QUERIES


def _axis(x, axis: int):
    """`axis`, or None where `x` does not vary along it."""
    return None if x.shape[axis] == 1 else axis


def _axes(arrays: dict):
    """For each array its batch axis, and for each its query axis, or None."""
    queries: dict[str, int | None] = {"q": 1, "g": 1, "o": 1, "q_segments": 1}
    queries |= {"top": 2, "log_total": 2, "delta": 2}
    names = *queries, "k", "v", "q_len", "kv_len", "kv_segments"
    batch: dict[str, int | None] = dict.fromkeys(names, 0)
    for name in ("bias", "mask"):
        if name in arrays:
            batch[name] = _axis(arrays[name], 0)
            queries[name] = _axis(arrays[name], 2)
    return batch, queries


def _divide(arrays: dict, axes: dict):
    """The arrays to cut, with their axis, and the others."""
    cut = {k: (x, axes[k]) for k, x in arrays.items() if axes.get(k) is not None}
    return cut, {k: x for k, x in arrays.items() if k not in cut}


def _outs(blocks: AttentionBlocks, results: dict, batch_axes: dict, query_axes: dict):
    """The outputs over the batch, and those over the queries of some rows of it."""
    over_batch, over_queries = {}, {}
    for name, (shape, dtype) in results.items():
        b, t = batch_axes[name], query_axes.get(name)
        over_batch[name] = BlockedOutput(
            shape, wide_dtype(dtype) if b is None else dtype, b
        )
        some = shape if b is None else (blocks.rows.size, *shape[1:])
        over_queries[name] = BlockedOutput(
            some, wide_dtype(dtype) if None in (b, t) else dtype, t
        )
    return over_batch, over_queries


def _run(
    blocks: AttentionBlocks, arrays: dict, results: dict, compute, add: bool = False
):
    """`compute(place, fresh, arrays)` over all blocks of the batch and the queries."""
    arrays = {k: x for k, x in arrays.items() if x is not None}
    likes = tuple(arrays.values())
    batch_axes, query_axes = _axes(arrays)
    # An output has the axes of the array of its name; one without them is summed.
    over_batch, over_queries = _outs(blocks, results, batch_axes, query_axes)
    per_batch, whole = _divide(arrays, batch_axes)
    keys = jnp.arange(arrays["k"].shape[1], dtype=jnp.int32)

    def some_rows(i, **rows):
        per_query, fixed = _divide(whole | rows, query_axes)

        def some_queries(j, **queries):
            times = blocks.queries.index(j)
            zero = (j & 0).astype(jnp.float32)
            rows = blocks.rows.index(i)
            place = BlockPosition(rows, times, keys, blocks.queries.length, zero)
            return compute(place, blocks.queries.fresh(j), fixed | queries)

        return blockwise(
            blocks.queries, some_queries, per_query, over_queries, likes, add
        )

    got = blockwise(blocks.rows, some_rows, per_batch, over_batch, likes)
    return {k: x.astype(results[k][1]) for k, x in got.items()}


def _row_sums(g, o):
    """sum(g * o) of each query and head, wide: [b, n, t]."""
    wide = wide_dtype(o.dtype)
    return jnp.swapaxes((g.astype(wide) * o.astype(wide)).sum(axis=-1), 1, 2)


def _extras(arrays: dict) -> Extras:
    return Extras(*(arrays.get(name) for name in Extras._fields))


def forward(blocks: AttentionBlocks, q, k, v, bias, extras: Extras):
    """(o, row maximum [b, n, t], logarithm of the row sum [b, n, t])."""
    batch, length, heads, _ = q.shape
    stats = (batch, heads, length), wide_dtype(q.dtype)
    results = {"o": (q.shape, q.dtype), "top": stats, "log_total": stats}
    arrays = {"q": q, "k": k, "v": v, "bias": bias, **extras._asdict()}

    def compute(place, _, a):
        got = block.forward(
            blocks.rules, place, a["q"], a["k"], a["v"], a.get("bias"), _extras(a)
        )
        return dict(zip(results, got, strict=True))

    got = _run(blocks, arrays, results, compute)
    return tuple(got[name] for name in results)


def backward(blocks: AttentionBlocks, wanted, saved: dict, g):
    """A dict of the gradients named in `wanted`."""
    # in one order in every process, or no compiled program would be found in a cache
    names = sorted(wanted - {"v"})
    results = {name: (saved[name].shape, saved[name].dtype) for name in names}
    if "v" in wanted:
        results["v"] = saved["k"].shape, saved["k"].dtype
    # what the forward pass computed is recomputed here: without the barrier XLA would
    # find and keep it
    q, g, seed = jax.lax.optimization_barrier((saved["q"], g, saved["seed"]))
    arrays = {**saved, "q": q, "g": g, "seed": seed}
    if wanted != {"v"}:
        # before the loop, so that the output need not wait for its end
        arrays["delta"] = _row_sums(g, arrays.pop("o"))

    def compute(place, fresh, a):
        if blocks.queries.ragged:  # rows of an earlier block count there alone
            a["g"] = a["g"] * fresh[None, :, None, None].astype(a["g"].dtype)
            if "delta" in a:
                a["delta"] = a["delta"] * fresh[None, None].astype(a["delta"].dtype)
        return block.backward(blocks.rules, place, wanted, a, _extras(a))

    return _run(blocks, arrays, results, compute, add=True)
