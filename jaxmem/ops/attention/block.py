"""One block of attention: some rows of the batch, some queries, all their keys.

Letters: b batch, t query, s key, n heads = k key heads * g, h head dimension.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.ops.common.lean import wide_dtype
from pallas_kernels import attention as common
from pallas_kernels.attention import MASKED as MASKED
from pallas_kernels.attention import Extras as Extras
from pallas_kernels.attention import Rules as Rules


def visible(rules: Rules, times, keys, extras):
    """Boolean [b|1, n|1, t|1, s|1] of the logits that count; None where all do."""
    near = common.near(rules, times[:, None], keys[None, :])
    seen = [] if near is None else [near[None, None]]
    if extras.mask is not None:
        seen.append(extras.mask)
    if extras.q_len is not None:
        seen.append(inside(times, extras.q_len)[:, None, :, None])
    if extras.kv_len is not None:
        seen.append(inside(keys, extras.kv_len)[:, None, None, :])
    if extras.q_segments is not None:
        ours, theirs = extras.q_segments, extras.kv_segments
        seen.append(ours[:, None, :, None] == theirs[:, None, None, :])
    return common.all_of(seen)


def inside(positions, lengths):
    """Boolean [b, positions]: below each length."""
    return positions[None, :] < lengths[:, None]


def dropout_kept(rules: Rules, seed, heads: int, length: int, rows, times, keys):
    """Dropout's mask of a block: [b, n, t, s], or [1, 1, t, s] where it is shared."""
    b = rows.astype(jnp.uint32)[:, None, None, None]
    n = jnp.arange(heads, dtype=jnp.uint32)[None, :, None, None]
    t = times.astype(jnp.uint32)[None, None, :, None]
    s = keys.astype(jnp.uint32)[None, None, None, :]
    return common.dropout_mask(
        rules, seed, common.dropout_row(rules, b, n, t, heads, length), s
    )


class BlockPosition(NamedTuple):
    """Where a block stands, int32 positions; `length` is that of all queries."""

    rows: Any
    times: Any
    keys: Any
    length: int
    zero: Any  # a float32 zero that only the block knows (see `common/blocks.py`)


def _zero(place: BlockPosition, x):
    return place.zero.astype(x.dtype)


def _heads_first(x, kv_heads: int):
    """[b, t, n, h] as [b, k, g t, h]: one matrix for each head of keys.

    A product then has its rows as they are stored. XLA:GPU would put the keys first
    for groups of heads, and read all logits across their order.
    """
    b, t, n, h = x.shape
    x = x.reshape(b, t, kv_heads, n // kv_heads, h)
    return jnp.transpose(x, (0, 2, 3, 1, 4)).reshape(b, kv_heads, -1, h)


def _scores(q, k):
    """q k' for each head: [b, n, t, s], wide."""
    out = jnp.einsum(
        "bkrh,bskh->bkrs",
        _heads_first(q, k.shape[2]),
        k,
        preferred_element_type=wide_dtype(q.dtype),
    )
    return out.reshape(q.shape[0], q.shape[2], q.shape[1], k.shape[1])


def _over_keys(p, v):
    """p v for each head: [b, t, n, h], wide."""
    b, n, t, s = p.shape
    out = jnp.einsum(
        "bkrs,bskh->bkrh",
        p.reshape(b, v.shape[2], -1, s),
        v,
        preferred_element_type=wide_dtype(v.dtype),
    )
    return jnp.swapaxes(out.reshape(b, n, t, v.shape[3]), 1, 2)


def _over_queries(p, x, kv_heads: int):
    """p' x for each key head: [b, s, k, h], wide."""
    b, _, _, s = p.shape
    return jnp.einsum(
        "bkrs,bkrh->bskh",
        p.reshape(b, kv_heads, -1, s),
        _heads_first(x, kv_heads),
        preferred_element_type=wide_dtype(x.dtype),
    )


def to_times_first(x):
    """[b, n, t] to [b, t, n, 1]."""
    return jnp.swapaxes(x, 1, 2)[..., None]


def _logits(rules: Rules, place: BlockPosition, q, k, bias, extras: Extras):
    logits = _scores(q, k) * rules.scale
    if bias is not None:
        logits = logits + jnp.broadcast_to(bias, logits.shape).astype(logits.dtype)
    seen = visible(rules, place.times, place.keys, extras)
    if seen is None:
        return logits, None
    seen = jnp.broadcast_to(seen, logits.shape)
    return jnp.where(seen, logits, _zero(place, logits) + MASKED), seen


def _keep(rules: Rules, place: BlockPosition, heads: int, seed, shape):
    keep = dropout_kept(
        rules, seed, heads, place.length, place.rows, place.times, place.keys
    )
    return jnp.broadcast_to(keep, shape)


def _queries_inside(place: BlockPosition, extras: Extras, x):
    """`x` [b, t, n, h] with zeros for the queries beyond their sequence."""
    if extras.q_len is None:
        return x
    live = inside(place.times, extras.q_len)[..., None, None]
    return jnp.where(live, x, _zero(place, x))


def forward(rules: Rules, place: BlockPosition, q, k, v, bias, extras: Extras):
    """(o [b, t, n, h], row maximum [b, n, t], logarithm of the row sum [b, n, t])."""
    logits, _ = _logits(rules, place, q, k, bias, extras)
    top = logits.max(axis=-1)
    p = jnp.exp(logits - top[..., None])
    total = p.sum(axis=-1)
    if rules.rate:
        keep = _keep(rules, place, q.shape[2], extras.seed, p.shape)
        p = jnp.where(keep, p, _zero(place, p))
    # divided after the product: one pass less over the block
    o = _over_keys(p.astype(v.dtype), v)
    o = o / to_times_first(total * (1.0 - rules.rate))
    o = _queries_inside(place, extras, o.astype(q.dtype))
    # Apart: a huge maximum, as of a row masked by a bias of -1e9, would swallow the
    # logarithm in a sum (log-sum-exp).
    return o, top, jnp.log(total)


def _reduced(x, shape):
    """Sum of `x` over the axes that `shape` has with length 1."""
    axes = tuple(i for i, n in enumerate(shape) if n == 1 and x.shape[i] != 1)
    return x.sum(axis=axes, keepdims=True)


def _kept(rules: Rules, place: BlockPosition, shape, extras: Extras):
    """A function that applies dropout to probabilities, or to their gradient."""
    if not rules.rate:
        return lambda x: x
    keep = _keep(rules, place, shape[1], extras.seed, shape)
    return lambda x: jnp.where(keep, x / (1.0 - rules.rate), _zero(place, x))


def backward(
    rules: Rules, place: BlockPosition, wanted, a: dict, extras: Extras
) -> dict:
    """Wide gradients of those of q, k, v, bias that `wanted` names."""
    # Of v and delta (the sums of g and the output) nothing is needed where only v is
    # wanted.
    q, k, bias = a["q"], a["k"], a.get("bias")
    g = _queries_inside(place, extras, a["g"])
    with jax.named_scope(_compat.RECOMPUTED):
        logits, seen = _logits(rules, place, q, k, bias, extras)
    p = jnp.exp(logits - a["top"][..., None] - a["log_total"][..., None])
    # rounded as the forward pass has it, and held: the logits can go before dp comes
    p = jax.lax.optimization_barrier(p.astype(q.dtype)).astype(p.dtype)
    drop = _kept(rules, place, p.shape, extras)
    out = {}
    if "v" in wanted:
        out["v"] = _over_queries(drop(p).astype(g.dtype), g, k.shape[2])
    if wanted == {"v"}:
        return out
    if "v" in wanted:  # first, or the dropped probabilities wait beside what follows
        out["v"], g = jax.lax.optimization_barrier((out["v"], g))
    delta = a["delta"]
    if extras.q_len is not None:  # a cotangent of padding may be anything
        live = inside(place.times, extras.q_len)[:, None]
        delta = jnp.where(live, delta, jnp.zeros_like(delta))
    ds = p * (drop(_scores(g, a["v"])) - delta[..., None])
    if seen is not None:
        ds = jnp.where(seen, ds, _zero(place, ds))
    if "bias" in wanted:
        out["bias"] = _reduced(ds, a["bias"].shape)
    ds = (ds * rules.scale).astype(q.dtype)
    if "q" in wanted:
        out["q"] = _over_keys(ds, k)
    if "k" in wanted:
        out["k"] = _over_queries(ds, q, k.shape[2])
    return out
