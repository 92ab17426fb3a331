"""A memory of many values, found by keys that are pairs of two halves.

`n` keys of each half stand for `n ** 2` pairs. The `k` best pairs are among those of
the `k` best halves, so that 2 n products and k ** 2 sums find them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int32

from jaxmem._checks import check_array, check_int, shown, wrong_value
from jaxmem.ops.activations.softmax import softmax
from jaxmem.ops.common.lean import wide_dtype, widen
from jaxmem.ops.embedding.bag import bag_of
from jaxmem.ops.embedding.lookup import check_table


def product_key_memory(
    queries: Float[ArrayLike, "*batch heads d"],
    keys: Float[ArrayLike, "heads 2 n half"],
    values: Float[ArrayLike, "n_squared v"],
    k: int,
) -> Float[Array, "*batch v"]:
    """The sum over heads of the values of the k best keys, weighted by a softmax.

    The key of value `i * n + j` is the i-th of the first half and the j-th of the
    second, side by side; its score is the product with the query of the same head.
    The k best are found exactly. Products are in the dtype of the queries, their sums
    and the weights in float32 at least.

    Args:
        queries: floating, one for each head.
        keys: floating, the two halves of each head; each of half a query's size.
        values: floating, of all heads; a table as that of `embed`, in any dtype.
        k: values for each query and head, at most n.

    Returns:
        An array in the dtype of the values.

    Raises:
        TypeError: arrays that are not floating; a `k` that is no integer.
        ValueError: shapes that do not fit each other; a `k` that is not from 1 to n.

    Saves:
        For each query and head k ids of 4 bytes and k weights of 4; queries, keys and
        values as they are given, arguments. The backward pass looks the values up a
        second time. In either pass there are for a while 2 n scores for each query and
        head; the gradient of values has k rows for each, which
        `jaxmem.optim.value_and_row_grad` adds into no array of the table's size.

    Source:
        Lample et al., "Large Memory Layers with Product Keys", arXiv 1907.05242,
        section 3.

    Example::

        queries = jnp.ones((2, 5, 4, 16))  # 4 heads
        keys, values = jnp.ones((4, 2, 32, 8)), jnp.ones((32**2, 64))
        y = jaxmem.ops.product_key_memory(queries, keys, values, k=8)  # [2, 5, 64]
    """
    queries, keys, values = _checked(queries, keys, values, k)
    with jax.named_scope("jaxmem.product_key_memory"):
        places = _best(lax.stop_gradient(queries), lax.stop_gradient(keys), k)
        weights = softmax(_scores_at(queries, keys, places), axis=-1)
        y = bag_of("sum", values, places, weights)  # a bag for each head
        return jnp.sum(widen(y), -2).astype(values.dtype)


def _checked(queries: Any, keys: Any, values: Any, k: Any) -> tuple[Array, ...]:
    name = "product_key_memory"
    check_array(f"{name}: queries", queries, "floating")
    check_array(f"{name}: keys", keys, "floating")
    queries, keys = jnp.asarray(queries), jnp.asarray(keys)
    values = check_table(name, values, "values")
    fits = queries.ndim >= 2 and keys.ndim == 4 and values.ndim == 2
    if fits:
        heads, two, n, half = keys.shape
        fits = two == 2 and queries.shape[-2:] == (heads, 2 * half)
        fits = fits and values.shape[0] == n**2
    if not fits:
        raise ValueError(
            f"{name}: queries={shown(queries)}, keys={shown(keys)}, "
            f"values={shown(values)}: queries [..., heads, d], keys [heads, 2, n, "
            "d / 2], values [n ** 2, v]"
        )
    check_int(f"{name}: k", k, 1)
    if k > keys.shape[2]:
        raise wrong_value(f"{name}: k", k, f"1 to the {keys.shape[2]} keys of a half")
    return queries, keys, values


def _scores(queries: Array, keys: Array) -> Float[Array, "*batch heads 2 n"]:
    halves = queries.reshape(*queries.shape[:-1], 2, -1)
    how = {"preferred_element_type": wide_dtype(queries.dtype)}
    return jnp.einsum("...hpd,hpnd->...hpn", halves, keys.astype(halves.dtype), **how)


def _best(queries: Array, keys: Array, k: int) -> Int32[Array, "*batch heads k 1"]:
    """Ids of values, as `taken` has them."""
    tops, at = lax.top_k(_scores(queries, keys), k)
    sums = tops[..., 0, :, None] + tops[..., 1, None, :]
    _, best = lax.top_k(sums.reshape(*sums.shape[:-2], k * k), k)
    first = jnp.take_along_axis(at[..., 0, :], best // k, -1)
    second = jnp.take_along_axis(at[..., 1, :], best % k, -1)
    return (first * keys.shape[2] + second)[..., None]


# Linear in queries and in keys: the backward pass needs them and the ids, and computes
# no score a second time.
@functools.partial(jax.checkpoint, prevent_cse=False)
def _scores_at(queries: Array, keys: Array, places: Array) -> Array:
    """The scores of these values, [*batch, heads, k]."""
    n, ids = keys.shape[2], places[..., 0]
    at = jnp.stack([ids // n, ids % n], -2)
    return jnp.sum(jnp.take_along_axis(_scores(queries, keys), at, -1), -2)
