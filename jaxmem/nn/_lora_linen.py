"""A dense layer with a trained product of two thin matrices beside its kernel."""

import functools
from collections.abc import Callable
from dataclasses import field
from typing import Any

from flax import linen as nn
from jaxtyping import Array, Float

from jaxmem import ops
from jaxmem._checks import check_float, check_int
from jaxmem.nn import _linen_calls as calls


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
        The input and the thin product, of rank numbers a row, where `lora_a` and
        `lora_b` are trained; where the input is differentiated the parameters
        themselves, and no copy of them in the dtype of the computation.

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
        # Never `x @ (kernel + a @ b)`: no weight of the kernel's size is made, and the
        # input and the thin product are what the gradients of a and b need.
        thin = ops.dense(inputs, a, dtype=y.dtype, precision=self.precision)
        added = ops.dense(thin, b, dtype=y.dtype, precision=self.precision)
        alpha = self.rank if self.alpha is None else self.alpha
        return y + float(alpha / self.rank) * added
