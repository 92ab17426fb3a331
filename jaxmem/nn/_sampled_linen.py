"""`flax.linen.Dense` whose kernel gradient comes from a part of its input."""

from dataclasses import field
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jaxtyping import Array, Float, Int

from jaxmem import ops
from jaxmem.nn import _velora
from jaxmem.nn._constructor import check_sampled_dense, check_velora

_COLLECTION = "velora"


def parameters(module: nn.Dense, inputs: Array):
    """Kernel and bias as `flax.linen.Dense` makes them."""
    if (
        module.dot_general is not None
        or module.dot_general_cls is not None
        or module.promote_dtype is not promote_dtype
    ):
        raise ValueError(
            f"{type(module).__name__} takes no dot_general and no promote_dtype: its "
            "product has a derivative of its own"
        )
    shape = (inputs.shape[-1], module.features)
    kernel = module.param("kernel", module.kernel_init, shape, module.param_dtype)
    if not module.use_bias:
        return kernel, None
    shape = (module.features,)
    return kernel, module.param("bias", module.bias_init, shape, module.param_dtype)


class SampledDense(nn.Dense):
    """`flax.linen.Dense`, built on `jaxmem.ops.sampled_dense`.

    Outputs and the gradients of inputs and bias are exact; the kernel's gradient is an
    unbiased estimate from `budget` of the rows. Parameters are those of `Dense`.

    Args:
        budget: the share of rows kept; keyword-only, as all of these.
        method: as for `jaxmem.ops.sampled_dense`.
        deterministic: True makes the layer a plain `Dense`, which needs no key.
        rng_collection: of the key, as for `flax.linen.Dropout`.
        norm_cache: a shape (samples, ...), that of the inputs without the last axis and
            with any number of samples; or that number. Rows are then drawn by the norms
            that the gradients of their outputs had in the last step with the same
            sample, `sample_ids` of the call, or at the same place in the batch. The
            norms are the variable "norm_cache" of Flax's collection
            "_overwrite_with_gradient": differentiate the loss in it, too, and replace
            it with its gradient, as Flax's `TrainState` does. A cache is of one call in
            a step: the gradients of several calls would be added up.

    Saves:
        `budget` of the rows of the input.
    """

    # Flax annotates a field with a protocol that type checkers cannot test.
    __no_type_check__ = True

    budget: float = field(default=0.3, kw_only=True)
    method: str = field(default="wta", kw_only=True)
    deterministic: bool | None = field(default=None, kw_only=True)
    rng_collection: str = field(default="sampling", kw_only=True)
    norm_cache: int | tuple[int, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_sampled_dense(self.budget, self.method, self.norm_cache)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        inputs: Float[Array, "*batch d"],
        deterministic: bool | None = None,
        row_norms: jax.Array | None = None,
        sample_ids: Int[Array, " samples"] | None = None,
    ) -> Float[Array, "*batch f"]:
        """Applies the linear map; `deterministic` in one place, False if in none."""
        if deterministic is not None or self.deterministic is not None:
            deterministic = nn.merge_param(
                "deterministic", self.deterministic, deterministic
            )
        kernel, bias = parameters(self, inputs)
        options: Any = dict(dtype=self.dtype, precision=self.precision)
        cache = None
        if not deterministic and self.norm_cache is not None:
            name = OVERWRITE_WITH_GRADIENT, "norm_cache"
            start = jnp.zeros, self.norm_cache, jnp.float32
            cache = self.variable(*name, *start).value
        if deterministic or self.is_initializing():
            return ops.dense(inputs, kernel, bias, **options)
        options["norm_cache"] = cache
        options |= dict(budget=self.budget, method=self.method, row_norms=row_norms)
        options |= dict(sample_ids=sample_ids, key=self.make_rng(self.rng_collection))
        return ops.sampled_dense(inputs, kernel, bias, **options)


class VeLoRADense(nn.Dense):
    """`flax.linen.Dense`, built on `jaxmem.ops.velora_dense`.

    The kernel's gradient is biased: it sees one direction of each sub-token. That
    vector is the variable "projection" of the collection "velora", zeros until a batch
    comes with `mutable=["velora"]`, from which it is taken; `init` takes none. Where
    none is there, each batch has its own, which costs a pass over the input. Carry the
    collection along as the statistics of batch norms are, and scan layers with
    `variable_axes={"params": 0, "velora": 0}`.

    Args:
        groups: sub-tokens of a token; keyword-only, as all of these.
        scale: of the kernel's gradient.
        method: how the vector is found. "average": the mean sub-token of the first
            batch, which then stays. "svd": in place of the mean the first right
            singular vector. "ema": an exponential moving average of the means of
            all batches, each normalised; needs `mutable` in every step.
        decay: of "ema".

    Saves:
        `groups` values a row of the input, and the vector.

    Source:
        Miles et al., VeLoRA (NeurIPS 2024), arXiv 2405.17991, section 3.
    """

    # Flax annotates a field with a protocol that type checkers cannot test.
    __no_type_check__ = True

    groups: int = field(default=32, kw_only=True)
    scale: float = field(default=1.0, kw_only=True)
    method: str = field(default="average", kw_only=True)
    decay: float = field(default=0.9, kw_only=True)

    def __post_init__(self) -> None:
        check_velora(self.groups, self.scale, self.method, self.decay)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: Float[Array, "*batch d"]) -> Float[Array, "*batch f"]:
        """Applies the linear map to the last axis."""
        kernel, bias = parameters(self, inputs)
        options: Any = dict(dtype=self.dtype, precision=self.precision)
        trains = self.is_mutable_collection(_COLLECTION)
        kept = None
        if trains or self.has_variable(_COLLECTION, "projection"):
            start = _velora.unknown, inputs.shape[-1], self.groups
            kept = self.variable(_COLLECTION, "projection", *start)
        if self.is_initializing():  # its inputs may be zeros of the right shape
            return ops.dense(inputs, kernel, bias, **options)
        taken, following = _velora.direction(
            None if kept is None else kept.value,
            inputs,
            groups=self.groups,
            method=self.method,
            decay=self.decay,
            trains=trains,
        )
        if kept is not None and trains:
            kept.value = following
        options |= dict(projection=taken, scale=self.scale)
        return ops.velora_dense(inputs, kernel, bias, **options)
