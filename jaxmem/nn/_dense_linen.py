"""`flax.linen.Dense` with a low-rank addition."""

import functools
from collections.abc import Callable
from dataclasses import field
from typing import Any

import jax
from flax import linen as nn
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from jaxmem import ops
from jaxmem._checks import check_float, check_int
from jaxmem.nn import _linen_calls as calls


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
