"""What the memory layers of linen and nnx have in common."""

from typing import Any

import jax

from jaxmem import ops
from jaxmem._checks import check_bool, check_callable, check_int, wrong_value

_MOST_KEYS = 46340  # ids of pairs are int32


def check_memory(layer: Any) -> None:
    """The options of a `ProductKeyMemory`."""
    name = type(layer).__name__
    check_int(f"{name}: num_keys", layer.num_keys, 1, _MOST_KEYS)
    if layer.features is not None:
        check_int(f"{name}: features", layer.features, 1)
    check_int(f"{name}: heads", layer.heads, 1)
    check_int(f"{name}: k", layer.k, 1, layer.num_keys)
    check_int(f"{name}: key_features", layer.key_features, 2)
    if layer.key_features % 2:
        even = "an even number, for two halves"
        raise wrong_value(f"{name}: key_features", layer.key_features, even)
    check_bool(f"{name}: gated", layer.gated)
    if layer.query_norm is not None:
        check_callable(f"{name}: query_norm", layer.query_norm)


def keys_shape(layer: Any) -> tuple[int, ...]:
    return layer.heads, 2, layer.num_keys, layer.key_features // 2


def keys_init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Uniform between +-1 / sqrt of the size of half a key."""
    bound = shape[-1] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def values_init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Normal, of deviation 1 / sqrt of the size of a value."""
    return shape[-1] ** -0.5 * jax.random.normal(key, shape, dtype)


def read(layer: Any, queries: jax.Array, keys: jax.Array, values: Any) -> jax.Array:
    """What a layer reads, by the queries of all heads in one axis."""
    shape = *queries.shape[:-1], layer.heads, layer.key_features
    queries = queries.reshape(shape)
    if layer.query_norm is not None:
        queries = layer.query_norm(queries).astype(queries.dtype)
    return ops.product_key_memory(queries, keys, values, layer.k)
