"""Dense layers of linen that are more than Flax's: sampled, projected, low-rank."""

import functools
from collections.abc import Callable
from dataclasses import field
from typing import Any

import jax
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from jaxmem import ops
from jaxmem._checks import check_float, check_int
from jaxmem.nn import _linen_calls as calls
from jaxmem.nn._constructor import check_sampled_dense, check_velora

_COLLECTION = "velora"


def _parameters(module: nn.Dense, inputs):
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

    Saves:
        `budget` of the rows of the input.
    """

    # Flax annotates a field with a protocol that type checkers cannot test.
    __no_type_check__ = True

    budget: float = field(default=0.3, kw_only=True)
    method: str = field(default="wta", kw_only=True)
    deterministic: bool | None = field(default=None, kw_only=True)
    rng_collection: str = field(default="sampling", kw_only=True)

    def __post_init__(self) -> None:
        check_sampled_dense(self.budget, self.method)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        inputs: Float[Array, "*batch d"],
        deterministic: bool | None = None,
        row_norms: jax.Array | None = None,
    ) -> Float[Array, "*batch f"]:
        """Applies the linear map; `deterministic` in one place, False if in none."""
        if deterministic is not None or self.deterministic is not None:
            deterministic = nn.merge_param(
                "deterministic", self.deterministic, deterministic
            )
        kernel, bias = _parameters(self, inputs)
        options: Any = dict(dtype=self.dtype, precision=self.precision)
        if deterministic or self.is_initializing():
            return ops.dense(inputs, kernel, bias, **options)
        options |= dict(budget=self.budget, method=self.method, row_norms=row_norms)
        key = self.make_rng(self.rng_collection)
        return ops.sampled_dense(inputs, kernel, bias, key=key, **options)


class VeLoRADense(nn.Dense):
    """`flax.linen.Dense`, built on `jaxmem.ops.velora_dense`.

    The kernel's gradient is biased: it sees one direction of each sub-token. That
    vector is a variable of the collection "velora", made by
    `jaxmem.ops.velora_projection` from the inputs of `init`: initialise with a real
    batch, or put the vector there.

    Args:
        groups: sub-tokens of a token; keyword-only, as all of these.
        scale: of the kernel's gradient.

    Saves:
        `groups` values a row of the input.
    """

    # Flax annotates a field with a protocol that type checkers cannot test.
    __no_type_check__ = True

    groups: int = field(default=32, kw_only=True)
    scale: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        check_velora(self.groups, self.scale)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: Float[Array, "*batch d"]) -> Float[Array, "*batch f"]:
        """Applies the linear map to the last axis."""
        kernel, bias = _parameters(self, inputs)
        make = ops.velora_projection
        projection = self.variable(
            _COLLECTION, "projection", make, inputs, self.groups
        ).value
        return ops.velora_dense(
            inputs,
            kernel,
            bias,
            projection=projection,
            scale=self.scale,
            dtype=self.dtype,
            precision=self.precision,
        )


# Never `x @ (kernel + a @ b)`: no weight of the kernel's size is made.
def _thin_products(x, a, b, **options: Any) -> jax.Array:
    return ops.dense(ops.dense(x, a, **options), b, **options)


@functools.cache
def _addition(dtype, precision) -> Callable:
    """(x, a, b) -> x @ a @ b, which keeps x for its backward pass, or x @ a."""
    addition = functools.partial(_thin_products, dtype=dtype, precision=precision)

    # The thin product costs rank / features of the base's.
    recomputed = jax.checkpoint(addition, prevent_cse=False)
    added = jax.custom_jvp(addition)

    @functools.partial(added.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        chosen = {
            i: t for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)
        }

        def of_chosen(*values):
            given = dict(enumerate(primals)) | dict(zip(chosen, values, strict=True))
            # the gradient of a reads x, which is then kept anyway
            return (recomputed if 1 in chosen else addition)(*given.values())

        return jax.jvp(of_chosen, [primals[i] for i in chosen], [*chosen.values()])

    return added


class LoRADense(nn.Dense):
    """`flax.linen.Dense` with a low-rank addition: its own parameters, and two more.

    Parameters `kernel` and `bias` are those of `Dense`, by name, shape and initial
    value, so that a pretrained layer's fit in; `lora_a` has the shape (inputs, rank)
    and `lora_b`, zeros at first, (rank, features).

    Args:
        rank: of the addition; keyword-only, as `alpha`, `a_init` and `b_init`.
        alpha: the addition is multiplied by `alpha / rank`; None: by one.
        a_init: initial values of `lora_a`.
        b_init: those of `lora_b`.

    Saves:
        The input, where `lora_a` is trained: the product of rank numbers a row is
        recomputed. Where `lora_b` alone is, that product and not the input. Where the
        input is differentiated the parameters themselves, and no copy of them in the
        dtype of the computation.

    Source:
        Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv
        2106.09685, section 4.1.
    """

    # Flax annotates a field with a protocol that type checkers cannot test.
    __no_type_check__ = True

    rank: int = field(default=8, kw_only=True)
    alpha: float | None = field(default=None, kw_only=True)
    a_init: Callable[..., Any] = field(
        default=nn.initializers.he_uniform(), kw_only=True
    )
    b_init: Callable[..., Any] = field(default=nn.initializers.zeros, kw_only=True)

    def __post_init__(self) -> None:
        check_int("LoRADense: rank", self.rank, 1)
        if self.alpha is not None:
            check_float("LoRADense: alpha", self.alpha)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: Float[Array, "*batch d"]) -> Float[Array, "*batch f"]:
        """Applies the linear map and its addition to the last axis."""
        flax_call = functools.partial(calls.raw(nn.Dense.__call__), self)
        y = calls.dense(self, flax_call, inputs)
        shapes = (inputs.shape[-1], self.rank), (self.rank, self.features)
        a = self.param("lora_a", self.a_init, shapes[0], self.param_dtype)
        b = self.param("lora_b", self.b_init, shapes[1], self.param_dtype)
        options = {"dtype": y.dtype, "precision": self.precision}
        if isinstance(inputs, ops.Normalized):  # is kept as it is
            added = _thin_products(inputs, a, b, **options)
        else:
            added = _addition(**options)(inputs, a, b)
        alpha = self.rank if self.alpha is None else self.alpha
        # Else XLA fuses the sum into whatever reads it, and keeps both parts.
        return jax.lax.optimization_barrier(y + float(alpha / self.rank) * added)
