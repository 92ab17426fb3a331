"""A memory layer of nnx, whose pool of values several layers may read."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxmem import ops
from jaxmem._checks import check_bool, check_int
from jaxmem.nn._layers_nnx import Linear
from jaxmem.nn._memory import check_memory, keys_init, keys_shape, read, values_init


class ProductKeyMemory(nnx.Module):
    """A layer that reads the values of the best keys of a large memory.

    As `jaxmem.nn.linen.ProductKeyMemory`, whose options it has; parameters: `query` (a
    `Linear`), `keys` and `values`; with `gated` `gate` and `out`.

    Args:
        in_features: of the input.
        num_keys: of each half; there are `num_keys ** 2` values.
        features: of a value and of the output; None: those of the input.
        use_values: False: the layer has no values, and is called with a pool.
        query_norm: of the queries, such as an `nnx.LayerNorm` of `key_features`.
        rngs: its stream "params" gives the keys.

    Raises:
        TypeError, ValueError: as the layer of linen; also a call without values of a
            layer that has none.

    Saves:
        As the layer of linen.
    """

    def __init__(
        self,
        in_features: int,
        num_keys: int,
        features: int | None = None,
        *,
        heads: int = 4,
        k: int = 32,
        key_features: int = 512,
        gated: bool = False,
        use_values: bool = True,
        query_norm: Callable[[Array], Array] | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        keys_init: Callable[..., Any] = keys_init,
        values_init: Callable[..., Any] = values_init,
        rngs: nnx.Rngs,
    ):
        check_int("ProductKeyMemory: in_features", in_features, 1)
        check_bool("ProductKeyMemory: use_values", use_values)
        self.num_keys, self.heads, self.k = num_keys, heads, k
        self.key_features, self.gated = key_features, gated
        self.features = in_features if features is None else features
        self.query_norm, self.dtype = query_norm, dtype
        check_memory(self)
        options: Any = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.query = Linear(in_features, heads * key_features, **options)
        draw = lambda init, shape: nnx.Param(init(rngs.params(), shape, param_dtype))
        self.keys = draw(keys_init, keys_shape(self))
        shape = num_keys**2, self.features
        self.values = draw(values_init, shape) if use_values else None
        sizes = (in_features, self.features), (self.features, self.features)
        self.gate, self.out = (
            Linear(*size, use_bias=False, **options) if gated else None
            for size in sizes
        )

    def __call__(
        self,
        x: Float[Array, "*batch d"],
        values: Float[Array, "n_squared features"] | None = None,
    ) -> Float[Array, "*batch features"]:
        """Reads the layer's own values, or those that are given."""
        if values is None:
            values = self._own_values()
        dtype = x.dtype if self.dtype is None else self.dtype
        queries = self.query(x).astype(dtype)
        y = read(self, queries, self.keys[...], values).astype(dtype)
        if self.gate is None or self.out is None:
            return y
        return self.out(ops.swiglu(self.gate(x).astype(dtype), y)).astype(dtype)

    def _own_values(self) -> Array:
        if self.values is None:
            raise ValueError(
                "ProductKeyMemory: values=None: a layer with use_values=False is "
                "called with the values that it reads"
            )
        return self.values[...]
