"""Attention and dropout against plain versions that hold the whole matrix.

The plain versions take the same dropout mask, from the generator. A shape is
(B, T, S, N, K, H): batch, queries, keys, query heads, key heads, head dimension.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.ops.attention.dot_product import dot_product_attention
from jaxmem.ops.common.lean import wide_dtype
from jaxmem.ops.randomness.bits import keep_mask, positions, seed_words
from jaxmem.ops.randomness.dropout import dropout
from pallas_kernels.hashing import random_mask, rounded_rate
from tests.arrays import array
from tests.references import Comparison

KEY = jax.random.key(23)
RATE = 0.3


def plain_dropout(x):
    keep = keep_mask(seed_words(KEY), *positions(x.shape), RATE)
    return jnp.where(keep.reshape(x.shape), x / (1 - RATE), jnp.zeros((), x.dtype))


def _positions_visible(t, s, is_causal=False, local_window_size=None):
    query, key = np.arange(t)[:, None], np.arange(s)[None, :]
    seen = np.ones((t, s), bool)
    if is_causal:
        seen &= query >= key
    if local_window_size is not None:
        left, right = local_window_size
        seen &= (query <= key + left) & (query >= key - right)
    return jnp.asarray(seen)


def plain_attention(
    q, k, v, bias=None, mask=None, rate=0.0, broadcast_dropout=False, **where
):
    """Softmax attention with its [B, N, T, S] logits written out."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    wide = wide_dtype(q.dtype)
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=wide)
    logits = logits / math.sqrt(q.shape[-1])
    if bias is not None:
        logits = logits + jnp.broadcast_to(bias, logits.shape).astype(wide)
    seen = _positions_visible(*logits.shape[2:], **where)[None, None]
    seen = seen if mask is None else seen & mask
    seen = jnp.broadcast_to(seen, logits.shape)
    p = jax.nn.softmax(jnp.where(seen, logits, -2e38), axis=-1)
    if rate:
        shape = (1, 1, *p.shape[2:]) if broadcast_dropout else p.shape
        row, column = positions(shape)
        seed = seed_words(KEY)
        rate = rounded_rate(rate)
        keep = random_mask(seed, row, column, rate)
        p = jnp.where(jnp.broadcast_to(keep, p.shape), p / (1 - rate), 0.0)
    return jnp.einsum("bnts,bsnh->btnh", p.astype(v.dtype), v)


def lean_attention(*args, rate=0.0, **kw):
    dropped = dict(dropout_rate=rate, dropout_rng=KEY) if rate else {}
    return dot_product_attention(*args, **dropped, **kw)


def qkv(shape, dtype, rng):
    b, t, s, n, k, h = shape
    sizes = ((b, t, n, h), (b, s, k, h), (b, s, k, h))
    return tuple(array(rng.standard_normal(x), dtype) for x in sizes)


def qkv_bias(shape, dtype, rng):
    bias = array(rng.standard_normal((1, shape[3], shape[1], shape[2])), dtype)
    return *qkv(shape, dtype, rng), bias


def saves(args, wanted):
    """The output, v in another order, and two float32 a row; those for v alone.

    Where cuDNN may read v in the backward pass, v itself is kept.
    """
    q, _, v = args[:3]
    rows = 2 * 4 * q.shape[0] * q.shape[1] * q.shape[2]
    as_it_is = len(args) == 3 and q.dtype.itemsize == 2
    kept = q.size + (0 if as_it_is else v.size)
    return rows + (0 if wanted == {2} else kept * q.dtype.itemsize)


SHAPES = ((1, 8, 8, 2, 2, 4), (2, 13, 7, 4, 2, 3))


def comparison(name, args=qkv, diff=(0, 1, 2), kept=None, block_size=5, **kw):
    return Comparison(
        name,
        functools.partial(lean_attention, block_size=block_size, **kw),
        functools.partial(plain_attention, **kw),
        args,
        shapes=SHAPES,
        diff=diff,
        saves=kept,
    )


COMPARISONS = [
    Comparison(
        "dropout",
        lambda x: dropout(x, RATE, KEY),
        plain_dropout,
        lambda shape, dtype, rng: (array(rng.standard_normal(shape), dtype),),
        shapes=((8,), (3, 5, 13)),
    ),
    comparison("attention", kept=saves),
    comparison("attention in one block", kept=saves, block_size=None),
    comparison("attention with bias", qkv_bias, (0, 3), saves),
    comparison("attention, causal window", is_causal=True, local_window_size=(9, 0)),
    comparison("attention with dropout", rate=RATE),
    comparison("attention with shared dropout", rate=RATE, broadcast_dropout=True),
]
