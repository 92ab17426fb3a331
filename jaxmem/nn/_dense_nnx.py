"""`flax.nnx.Linear` whose kernel gradient comes from a part of its input."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jaxtyping import Array, Float

from jaxmem import ops
from jaxmem.nn._constructor import check_sampled_dense, check_velora


def _parameters(module: nnx.Linear, out_sharding):
    if (
        module.dot_general not in (None, jax.lax.dot_general)
        or module.promote_dtype is not promote_dtype
        or module.preferred_element_type is not None
        or out_sharding is not None
    ):
        raise ValueError(
            f"{type(module).__name__} takes no dot_general, promote_dtype, "
            "preferred_element_type or out_sharding: its product has a derivative of "
            "its own"
        )
    return module.kernel[...], None if module.bias is None else module.bias[...]


class SampledDense(nnx.Linear):
    """`flax.nnx.Linear`, built on `jaxmem.ops.sampled_dense`.

    Outputs and the gradients of inputs and bias are exact; the kernel's gradient is an
    unbiased estimate from `budget` of the rows. Parameters are those of `Linear`.

    Args:
        budget: the share of rows kept; keyword-only. All others as in Flax; the stream
            "sampling" of `rngs` (else its default one) gives the keys.
        method: as for `jaxmem.ops.sampled_dense`; keyword-only.
        deterministic: True makes the layer a plain `Linear`; set by `model.eval()`.

    Saves:
        `budget` of the rows of the input.
    """

    def __init__(
        self,
        *args: Any,
        rngs: nnx.Rngs,
        budget: float = 0.3,
        method: str = "wta",
        deterministic: bool = False,
        **kwargs: Any,
    ):
        check_sampled_dense(budget, method)
        super().__init__(*args, rngs=rngs, **kwargs)
        self.budget, self.method, self.deterministic = budget, method, deterministic
        self.rngs = rngs["sampling"].fork()

    def __call__(
        self,
        inputs: Float[Array, "*batch d"],
        out_sharding: Any = None,
        *,
        deterministic: bool | None = None,
        row_norms: jax.Array | None = None,
    ) -> Float[Array, "*batch f"]:
        """Applies the linear map; `deterministic` here goes before the attribute."""
        kernel, bias = _parameters(self, out_sharding)
        options: Any = dict(dtype=self.dtype, precision=self.precision)
        if self.deterministic if deterministic is None else deterministic:
            return ops.dense(inputs, kernel, bias, **options)
        options |= dict(budget=self.budget, method=self.method, row_norms=row_norms)
        return ops.sampled_dense(inputs, kernel, bias, key=self.rngs(), **options)


class Projection(nnx.Variable):
    """The fixed vector of a `VeLoRADense`; no parameter."""


class VeLoRADense(nnx.Linear):
    """`flax.nnx.Linear`, built on `jaxmem.ops.velora_dense`.

    The kernel's gradient is biased: it sees one direction of each sub-token. Call
    `fit_projection` with the inputs of a first batch; before, that direction is the one
    with all elements alike.

    Args:
        groups: sub-tokens of a token; keyword-only. All others as in Flax.
        scale: of the kernel's gradient; keyword-only.

    Saves:
        `groups` values a row of the input.
    """

    def __init__(self, *args: Any, groups: int = 32, scale: float = 1.0, **kwargs: Any):
        check_velora(groups, scale)
        super().__init__(*args, **kwargs)
        self.groups, self.scale = groups, scale
        blank = jnp.zeros(self.in_features, jnp.float32)
        self.projection = Projection(ops.velora_projection(blank, groups))

    def fit_projection(self, inputs: Float[Array, "*batch d"]) -> None:
        """Takes the direction from inputs of the layer."""
        vector = ops.velora_projection(inputs, self.groups)
        self.projection[...] = vector.astype(jnp.float32)

    def __call__(
        self, inputs: Float[Array, "*batch d"], out_sharding: Any = None
    ) -> Float[Array, "*batch f"]:
        """Applies the linear map to the last axis."""
        kernel, bias = _parameters(self, out_sharding)
        return ops.velora_dense(
            inputs,
            kernel,
            bias,
            projection=self.projection[...],
            scale=self.scale,
            dtype=self.dtype,
            precision=self.precision,
        )
