"""`flax.nnx.Linear` whose kernel gradient comes from a part of its input."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jaxtyping import Array, Float, Int

from jaxmem import ops
from jaxmem.nn import _velora
from jaxmem.nn._constructor import check_sampled_dense, check_velora


def parameters(module: nnx.Linear, out_sharding):
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


class NormCache(nnx.Variable):
    """Norms of output gradients of a `SampledDense`; no parameter.

    The gradient of it is its next value: take that, in place of an optimizer's update.
    """

    _overwrite_with_gradient = True  # the name of Flax's collection of such values


class SampledDense(nnx.Linear):
    """`flax.nnx.Linear`, built on `jaxmem.ops.sampled_dense`.

    Outputs and the gradients of inputs and bias are exact; the kernel's gradient is an
    unbiased estimate from `budget` of the rows. Parameters are those of `Linear`.

    Args:
        budget: the share of rows kept; keyword-only. All others as in Flax; the stream
            "sampling" of `rngs` (else its default one) gives the keys.
        method: as for `jaxmem.ops.sampled_dense`; keyword-only.
        deterministic: True makes the layer a plain `Linear`; set by `model.eval()`.
        norm_cache: a shape (samples, ...), that of the inputs without the last axis and
            with any number of samples; or that number. Rows are then drawn by the norms
            that the gradients of their outputs had in the last step with the same
            sample, `sample_ids` of the call, or at the same place in the batch. The
            norms are the `NormCache` of the attribute `norm_cache`: differentiate the
            loss in it, too, and update the model with its gradient as the new value. A
            cache is of one call in a step: the gradients of several would be added up.

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
        norm_cache: int | tuple[int, ...] | None = None,
        **kwargs: Any,
    ):
        check_sampled_dense(budget, method, norm_cache)
        super().__init__(*args, rngs=rngs, **kwargs)
        self.budget, self.method, self.deterministic = budget, method, deterministic
        self.rngs = rngs["sampling"].fork()
        start = None if norm_cache is None else jnp.zeros(norm_cache, jnp.float32)
        self.norm_cache = None if start is None else NormCache(start)

    def __call__(
        self,
        inputs: Float[Array, "*batch d"],
        out_sharding: Any = None,
        *,
        deterministic: bool | None = None,
        row_norms: jax.Array | None = None,
        sample_ids: Int[Array, " samples"] | None = None,
    ) -> Float[Array, "*batch f"]:
        """Applies the linear map; `deterministic` here goes before the attribute."""
        kernel, bias = parameters(self, out_sharding)
        options: Any = dict(dtype=self.dtype, precision=self.precision)
        if self.deterministic if deterministic is None else deterministic:
            return ops.dense(inputs, kernel, bias, **options)
        options |= dict(budget=self.budget, method=self.method, row_norms=row_norms)
        if self.norm_cache is not None:
            options["norm_cache"] = self.norm_cache[...]
        options["sample_ids"] = sample_ids
        return ops.sampled_dense(inputs, kernel, bias, key=self.rngs(), **options)


class Projection(nnx.Variable):
    """The vector of a `VeLoRADense`, zeros at first; no parameter."""


class VeLoRADense(nnx.Linear):
    """`flax.nnx.Linear`, built on `jaxmem.ops.velora_dense`.

    The kernel's gradient is biased: it sees one direction of each sub-token. That
    vector is the variable `projection`, zeros until the first call that is not
    `deterministic`, or `fit_projection`, takes it from its inputs. Where none is kept,
    as in a pure function whose state is dropped, each batch has its own, which costs a
    pass over the input.

    Args:
        groups: sub-tokens of a token; keyword-only. All others as in Flax.
        scale: of the kernel's gradient; keyword-only.
        method: how the vector is found. "average": the mean sub-token of the first
            batch, which then stays. "svd": in place of the mean the first right
            singular vector. "ema": an exponential moving average of the means of
            all batches, each normalised. Keyword-only.
        decay: of "ema"; keyword-only.
        deterministic: True leaves the vector as it is; set by `model.eval()`.

    Saves:
        `groups` values a row of the input, and the vector.

    Source:
        Miles et al., VeLoRA (NeurIPS 2024), arXiv 2405.17991, section 3.
    """

    def __init__(
        self,
        *args: Any,
        groups: int = 32,
        scale: float = 1.0,
        method: str = "average",
        decay: float = 0.9,
        deterministic: bool = False,
        **kwargs: Any,
    ):
        check_velora(groups, scale, method, decay)
        super().__init__(*args, **kwargs)
        self.groups, self.scale = groups, scale
        self.method, self.decay, self.deterministic = method, decay, deterministic
        self.projection = Projection(_velora.unknown(self.in_features, groups))

    def fit_projection(self, inputs: Float[Array, "*batch d"]) -> None:
        """Takes the direction from inputs of the layer."""
        found, exists = _velora.found(inputs, self.groups, self.method)
        self.projection[...] = jnp.where(exists, found, jnp.zeros_like(found))

    def __call__(
        self, inputs: Float[Array, "*batch d"], out_sharding: Any = None
    ) -> Float[Array, "*batch f"]:
        """Applies the linear map to the last axis."""
        kernel, bias = parameters(self, out_sharding)
        taken, following = _velora.direction(
            self.projection[...],
            inputs,
            groups=self.groups,
            method=self.method,
            decay=self.decay,
            trains=not self.deterministic,
        )
        if not self.deterministic:
            self.projection[...] = following
        return ops.velora_dense(
            inputs,
            kernel,
            bias,
            projection=taken,
            scale=self.scale,
            dtype=self.dtype,
            precision=self.precision,
        )
