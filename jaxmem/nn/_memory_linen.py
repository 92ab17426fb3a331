"""A memory layer of linen, whose pool of values several layers may read."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxmem import ops
from jaxmem.nn._layers_linen import Dense
from jaxmem.nn._memory import check_memory, keys_init, keys_shape, read, values_init


class ProductKeyMemory(nn.Module):
    """A layer that reads the values of the best keys of a large memory.

    `ops.product_key_memory` of a query for each head, which a dense layer makes of the
    input. Parameters: "query" (a `Dense` with bias), "keys" [heads, 2, num_keys,
    key_features / 2] and "values" [num_keys ** 2, features]; with `gated` "gate" and
    "out". Values that are given at the call are read in place of its own, which it then
    does not have: one pool for several layers, under `flax.linen.scan` too.

    Attributes:
        num_keys: of each half; there are `num_keys ** 2` values.
        features: of a value and of the output; None: those of the input.
        heads: queries for each input, of one pool of values.
        k: values for each head.
        key_features: of a query; even.
        gated: multiplies the sum with silu of a dense layer of the input, and puts it
            through another ("Memory+"); both without bias.
        query_norm: of the queries [..., heads, key_features], such as a `nn.LayerNorm`
            or a `nn.BatchNorm`; None: none.
        dtype: of the computation, beside the values, which are looked up and summed
            in their own dtype; None: that of the input.
        param_dtype: of the parameters.
        keys_init: uniform, by default, between +-1 / sqrt(key_features / 2).
        values_init: normal, by default, of deviation 1 / sqrt(features).

    Raises:
        TypeError, ValueError: where it is made, numbers that are not positive, a `k`
            above `num_keys`, an odd `key_features`; at the call, values that are not
            `num_keys ** 2`.

    Saves:
        For each input and head k ids of 4 bytes, k weights of 4 and the query; the
        input; with `gated` the sum and the gate.

    Source:
        Lample et al., "Large Memory Layers with Product Keys", arXiv 1907.05242; one
        pool and the gate: Berges et al., "Memory Layers at Scale", arXiv 2412.09764,
        section 2.
    """

    num_keys: int
    features: int | None = None
    heads: int = 4
    k: int = 32
    key_features: int = 512
    gated: bool = False
    query_norm: Callable[[Array], Array] | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    keys_init: Callable[..., Any] = keys_init
    values_init: Callable[..., Any] = values_init

    def __post_init__(self) -> None:
        check_memory(self)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*batch d"],
        values: Float[Array, "n_squared features"] | None = None,
    ) -> Float[Array, "*batch features"]:
        """Reads the layer's own values, or those that are given."""
        dtype = x.dtype if self.dtype is None else self.dtype
        features = x.shape[-1] if self.features is None else self.features
        dense = functools.partial(Dense, dtype=dtype, param_dtype=self.param_dtype)
        queries = dense(self.heads * self.key_features, name="query")(x)
        shape = keys_shape(self)
        keys = self.param("keys", self.keys_init, shape, self.param_dtype)
        if values is None:
            shape = (self.num_keys**2, features)
            values = self.param("values", self.values_init, shape, self.param_dtype)
        y = read(self, queries, keys, values).astype(dtype)
        if not self.gated:
            return y
        gate = dense(y.shape[-1], use_bias=False, name="gate")(x)
        return dense(features, use_bias=False, name="out")(ops.swiglu(gate, y))
