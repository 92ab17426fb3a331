"""Plain references of lookups: `jnp.take`, and a reduction of what it gives."""

import functools

import jax
import jax.numpy as jnp

from jaxmem import ops
from tests.arrays import array
from tests.references import Comparison

ROWS = 7  # fewer than ids, so that some come twice


def plain_bag(table, ids, weights=None, *, mode="sum"):
    """Sums in the table's dtype."""
    rows, axis = jnp.take(table, ids, axis=0), ids.ndim - 1
    if mode == "max":
        return jnp.max(rows, axis)
    if weights is None:
        return getattr(jnp, mode)(rows, axis)
    if mode == "mean":
        weights = weights / jnp.sum(weights, -1, keepdims=True)
    spread = weights.reshape(*weights.shape, 1).astype(rows.dtype)
    return jnp.sum(rows * spread, axis)


def lookup_args(weighted):
    def args(shape, dtype, rng):
        table = array(rng.standard_normal((ROWS, shape[-1])), dtype)
        ids = array(rng.integers(-ROWS, ROWS, shape[:-1]), jnp.int32)
        if not weighted:
            return table, ids
        weights = array(rng.uniform(0.5, 1.5, ids.shape), dtype)
        return table, ids, weights

    return args


def kept(args, wanted):
    return args[1].size * 4


def bag(mode, weighted):
    return Comparison(
        f"{'weighted ' * weighted}embedding bag, {mode}",
        functools.partial(ops.embedding_bag, mode=mode),
        functools.partial(plain_bag, mode=mode),
        lookup_args(weighted),
        ((5, 4), (2, 3, 6, 5)),
        (0, 2) if weighted else (0,),
        kept,
    )


def memory(queries, keys, values, k):
    """Every pair of keys is scored, from the sums of the halves."""
    n, width = values.shape[0], queries.shape[-1] // 2
    side = keys.shape[2]
    pairs = jnp.concatenate(
        [jnp.repeat(keys[:, 0], side, axis=1), jnp.tile(keys[:, 1], (1, side, 1))], -1
    )
    assert pairs.shape == (keys.shape[0], n, 2 * width)
    best, ids = jax.lax.top_k(jnp.einsum("...hd,hnd->...hn", queries, pairs), k)
    weights = jax.nn.softmax(best, axis=-1)
    return jnp.einsum("...hk,...hkv->...v", weights, values[ids])


def memory_args(shape, dtype, rng):
    """Two heads of six keys of each half; the last axis is that of the values."""
    heads, side, half = 2, 6, 3
    draw = lambda *sizes: array(rng.standard_normal(sizes), dtype)
    queries = draw(*shape[:-1], heads, 2 * half)
    return queries, draw(heads, 2, side, half), draw(side**2, shape[-1])


def memory_kept(args, wanted):
    """Ids and weights of 2 heads and 3 values each."""
    return args[0].size // 6 * 3 * (4 + 4)


COMPARISONS = [
    Comparison(
        "product key memory",
        functools.partial(ops.product_key_memory, k=3),
        functools.partial(memory, k=3),
        memory_args,
        ((4, 5), (2, 3, 7)),
        (0, 1, 2),
        memory_kept,
    ),
    Comparison(
        "embed",
        ops.embed,
        lambda table, ids: jnp.take(table, ids, axis=0),
        lookup_args(False),
        ((9, 4), (3, 5, 13)),
        (0,),
        kept,
    ),
    *(bag(mode, False) for mode in ("sum", "mean", "max")),
    *(bag(mode, True) for mode in ("sum", "mean")),
]
