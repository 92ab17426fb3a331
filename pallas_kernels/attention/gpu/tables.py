"""The shapes and tables of attention on Hopper, which XLA computes for the kernels.

What a mask or dropout needs is a vector over queries or over keys: the first and the
last key that a query may see, its segment, its two words of the random generator; a
key's segment, word and bias. Kernels read these beside their tiles, so an element of a
tile costs only two comparisons and two multiplies. If the kernel computed a vector over
a tile's columns, that would cost as much as the tile: each of its threads holds a
quarter of all columns.

The tables take two four-byte numbers for each query and head with dropout, and up to
three for each query and each key of a sequence.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.arrays import padded
from pallas_kernels.attention.gpu.case import BLOCK, GpuCase
from pallas_kernels.attention.inputs import (
    MASKED,
    Inputs,
    any_in_blocks,
    dropout_row,
    keys_seen,
    sees_nothing,
)
from pallas_kernels.hashing import mask_column, mask_rows

FLOOR = -1e38  # a masked logit in base 2, where `MASKED` would be infinite
WORD = 32  # keys of a word of a mask


def in_base_2(x):
    """Natural logits or bias in base 2, which saves kernels a multiply each."""
    return jnp.maximum(x * np.float32(1 / math.log(2)), np.float32(FLOOR))


def from_base_2(top):
    """The natural row maximum."""
    natural = top * np.float32(math.log(2))
    return jnp.where(top > np.float32(FLOOR), natural, np.float32(MASKED))


def row_statistics(
    case: GpuCase, row_max, row_log_sum, q_len, apart: bool
) -> dict[str, jax.Array]:
    """ "top" and "log_total" in base 2, of whole blocks of queries.

    Unless `apart`, "top" is the sum of both.
    """
    # The maximum of a row past the array or past its sequence is set to infinity, so
    # that its probabilities are zero whatever its logits are. Copies fill such rows
    # with zeros, whose logits are the bias; the forward pass has no maximum of masked
    # rows.
    top, log_total = in_base_2(row_max), in_base_2(row_log_sum)
    if not apart:
        top = top + log_total
    if q_len is not None:
        live = _live(case.queries, q_len)[:, None]
        top = jnp.where(live, top, np.float32(np.inf))
    rows = {"top": padded(top, case.block_q, np.inf)}
    return rows | ({"log_total": padded(log_total, case.block_q)} if apart else {})


def _live(queries: int, q_len):
    """Boolean [b, queries]: which queries their sequence has."""
    return jnp.arange(queries, dtype=jnp.int32)[None] < q_len[:, None]


def live_queries(x, q_len):
    """`x` [b, t, n, h] with zeros for the queries beyond their sequence."""
    if q_len is None:
        return x
    return jnp.where(_live(x.shape[1], q_len)[..., None, None], x, jnp.zeros_like(x))


class MaskTables(NamedTuple):
    """Vectors [b|1, n|1, positions], and the rest: "bias_tile", "mask" and "blocks".

    "bias_tile" is a bias [b|1, n|1, queries, keys]. "mask" [b|1, n|1, keys / 32,
    queries] has a bit for each pair, in words of 32 keys of a query. "blocks"
    [b|1, blocks, 4] has for each block the first block that it visits, the first whose
    tile needs no mask, one past the last of these, and one past the last that it
    visits; without it all are visited.
    """

    per_query: dict[str, jax.Array]
    per_key: dict[str, jax.Array]
    rest: dict[str, jax.Array]


def make_tables(case: GpuCase, inputs: Inputs) -> MaskTables:
    """The tables of masks, bias and dropout; "blocks" are those of queries."""
    per_query, rest = _limits(case, inputs)
    per_key, extras = {}, inputs.extras
    if extras.mask is not None and not case.hides:
        rest["mask"] = _mask_words(case, extras.mask)
    if extras.q_segments is not None:
        per_query["q_segment"] = padded(extras.q_segments[:, None], case.block_q)
        per_key["kv_segment"] = padded(extras.kv_segments[:, None], case.block_kv)
    if case.rules.rate:
        rows = mask_rows(extras.seed, _dropout_rows(case))
        per_query["factor"], per_query["term"] = rows
        columns = jnp.arange(case.kv_blocks * case.block_kv, dtype=jnp.uint32)
        per_key["word"] = mask_column(extras.seed, columns)[None, None]
    for bias in _biases(case, inputs):
        if case.hides and bias.shape[3] == 1:
            bias = jnp.broadcast_to(bias, (*bias.shape[:3], case.keys))
        _check_bias(case, bias)
        if bias.shape[2] == 1:
            bias = in_base_2(bias[:, :, 0].astype(jnp.float32))
            per_key["bias"] = padded(bias, case.block_kv)
        else:
            rest["bias_tile"] = bias
    return MaskTables(per_query, per_key, rest)


def _biases(case: GpuCase, inputs: Inputs) -> list[jax.Array]:
    """The bias, with a mask of keys in it, or apart if the bias differs among queries.

    Together they might be as large as all logits.
    """
    bias = inputs.bias
    if not case.hides:
        return [] if bias is None else [bias]
    if bias is None or bias.shape[2] == 1:
        return [inputs.masked_bias()]
    return [inputs._replace(bias=None).masked_bias(), bias]


def _mask_words(case: GpuCase, mask):
    """The table "mask" of a boolean [b|1, n|1, t, s|1], of whole blocks."""
    if case.of_tile[1] != 2 * WORD:
        raise NotImplementedError(
            f"a mask that differs among queries in blocks of {2 * WORD} keys alone"
        )
    mask = jnp.broadcast_to(mask, (*mask.shape[:3], case.keys))
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, 0), (0, -case.keys % case.block_kv)))
    bits = mask.reshape(*mask.shape[:3], -1, WORD).astype(jnp.uint32)
    bits = bits << lax.broadcasted_iota(jnp.uint32, bits.shape, bits.ndim - 1)
    words = bits.sum(axis=-1, dtype=jnp.uint32)
    return padded(jnp.swapaxes(words, 2, 3), case.block_q)


def _check_bias(case: GpuCase, bias) -> None:
    if bias.shape[2:] not in ((1, case.keys), (case.queries, case.keys)):
        raise NotImplementedError(
            f"a bias of [b|1, n|1, t|1, s] alone, not {bias.shape}"
        )
    if bias.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"a bias of 16 or 32 bits alone, not {bias.dtype}")
    if bias.shape[2] > 1 and (case.queries % BLOCK or case.keys % BLOCK):
        raise NotImplementedError(
            f"a bias that differs among queries where {BLOCK} divides the lengths "
            f"alone, not {bias.shape}"
        )


def _limits(case: GpuCase, inputs: Inputs):
    """The first and last key of each query, and the blocks that follow from them."""
    rules, kv_len = case.rules, inputs.extras.kv_len
    if not rules.causal and rules.window is None and kv_len is None:
        return {}, {}
    t = jnp.arange(case.rows[2], dtype=jnp.int32)[None]
    t = jnp.minimum(t, case.queries - 1)
    limit = None if kv_len is None else kv_len[:, None]
    shape = (1 if kv_len is None else case.batch, t.shape[1])
    low, high = (
        jnp.broadcast_to(x, shape) for x in keys_seen(rules, t, t, case.keys, limit)
    )
    nothing = sees_nothing(rules, inputs)
    vectors = {"high": high[:, None]}
    if rules.window is not None:
        vectors["low"] = low[:, None]
    return vectors, {"blocks": _key_blocks(case, low, high, nothing)}


def _key_blocks(case: GpuCase, low, high, nothing):
    """At least one for each block of queries; all where a query sees nothing."""
    low, high = (x.reshape(x.shape[0], -1, case.block_q) for x in (low, high))
    first = jnp.clip(low.min(axis=-1) // case.block_kv, 0, case.kv_blocks - 1)
    stop = jnp.maximum(high.max(axis=-1) // case.block_kv, first) + 1
    whole = jnp.clip(-(-low.max(axis=-1) // case.block_kv), first, stop)
    past = jnp.clip((high.min(axis=-1) + 1) // case.block_kv, whole, stop)
    if nothing is not None:
        everything = any_in_blocks(nothing, case.block_q)
        first, whole, past = (jnp.where(everything, 0, x) for x in (first, whole, past))
        stop = jnp.where(everything, case.kv_blocks, stop)
    return jnp.stack([first, whole, past, stop], axis=-1).astype(jnp.int32)


def masks_all(case: GpuCase, tables: MaskTables) -> bool:
    """Whether every tile needs a mask, whatever its position."""
    return "q_segment" in tables.per_query or case.hides or "mask" in tables.rest


def transposed(case: GpuCase, tables: MaskTables) -> MaskTables:
    """The same tables, with "blocks" those of keys, and the bias [b|1, n|1, s, t]."""
    rest = dict(tables.rest)
    if "blocks" in rest:
        rest["blocks"] = _query_blocks(case, rest["blocks"])
    if "bias_tile" in rest:
        rest["bias_tile"] = jnp.swapaxes(rest["bias_tile"], 2, 3)
    return tables._replace(rest=rest)


def _query_blocks(case: GpuCase, key_blocks):
    """From the first to the last block of queries that visits each block of keys."""
    j = jnp.arange(case.kv_blocks, dtype=jnp.int32)[None, None]
    first, whole, past, stop = (key_blocks[..., x, None] for x in range(4))
    visits, unmasked = (first <= j) & (j < stop), (whole <= j) & (j < past)
    lowest, highest = _first(visits), case.q_blocks - _first(visits[:, ::-1])
    highest = jnp.where(visits.any(axis=1), highest, lowest)
    begin = jnp.where(unmasked.any(axis=1), _first(unmasked), highest)
    # Only the first run of such blocks: a loop with masks may take any others. Without
    # a window the run ends with the last block, and there is no loop after it.
    i = jnp.arange(case.q_blocks, dtype=jnp.int32)[None, :, None]
    others = ~unmasked & (i >= begin[:, None])
    end = jnp.where(others.any(axis=1), _first(others), highest)
    if case.rules.window is None:
        begin, end = jnp.where(end < highest, highest, begin), highest
    return jnp.stack([lowest, begin, end, highest], axis=-1)


def _first(holds):
    """The first place along axis 1 where a condition holds; 0 if there is none."""
    return jnp.argmax(holds, axis=1).astype(jnp.int32)


def _dropout_rows(case: GpuCase):
    shape = (1, 1, case.rows[2]) if case.rules.shared else case.rows
    b, n, t = (lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(3))
    return dropout_row(case.rules, b, n, t, case.heads, case.queries)
