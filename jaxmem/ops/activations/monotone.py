"""Activations that keep one array for the backward pass.

Monotone ones keep their output, from which the derivative follows in a step or two, and
which the matmul after it keeps anyway; `mish` keeps its input. Near saturation the
derivative carries the rounding error of the output (as that of `jax.numpy.tanh` does).
"""

import functools
import numbers
from collections.abc import Callable
from typing import SupportsFloat, TypeGuard

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Num, Shaped

from jaxmem._checks import check_scalar
from jaxmem.ops.activations.forms import Forms, forms, of_any_input
from jaxmem.ops.common.lean import (
    FAR_OUT,
    inexact,
    kept_linear,
    lean,
    of_input,
    of_output,
    recomputed,
)
from jaxmem.ops.few_bit.derivative import as_table, coded, fewbit_table

ABOVE_ZERO = float(jnp.finfo(jnp.float32).tiny)  # what is smaller, many chips call 0


def _rectified(x):
    return jnp.maximum(x, jnp.zeros((), x.dtype))


def _squared_relu_slope(y):
    positive = y > 0
    return jnp.where(positive, 2 * jnp.sqrt(jnp.where(positive, y, 1.0)), 0.0)


def _mish_slope(x):
    x = jnp.clip(x, -FAR_OUT, FAR_OUT)
    t = jnp.tanh(jax.nn.softplus(x))
    return t + x * (1 - t * t) * jax.nn.sigmoid(x)


def _monotone(name, value, slope) -> Forms:
    """The forms of an activation whose derivative is `slope` of its output."""
    exact = {
        "input": of_any_input(name, value),
        "output": lean(name, value, slope, of_output),
    }
    return forms(name, value, exact, name)


def _where_positive(kept, t):
    return jnp.where(kept[0] > 0, t, jnp.zeros((), t.dtype))


def _relu(keep) -> Callable:
    # Neither the largest of two numbers nor a selection rounds.
    return kept_linear("relu", _rectified, _where_positive, keep, narrow=True)


# Not a bit by default: before a matmul or a convolution the output is kept anyway, and
# a bit would come on top.
_RELU_BIT = coded("relu", _rectified, (ABOVE_ZERO,), (0.0, 1.0), narrow=True)
_RELU = Forms(
    "relu",
    {"input": _relu(of_input), "output": _relu(of_output), "bit": _RELU_BIT},
    lambda bits: _RELU_BIT,
    free_bits=1,
)


@functools.cache
def _elu(alpha: float) -> Forms:
    def value(x):
        return jax.nn.elu(x, alpha)

    exact = {
        "input": of_any_input("elu", value),
        "output": lean(
            "elu", value, lambda y: jnp.where(y > 0, 1.0, y + alpha), of_output
        ),
    }
    if alpha == 1:
        return forms("elu", value, exact, "elu")

    def code(bits):
        return coded("elu", value, *as_table(fewbit_table(value, bits)))

    return Forms(f"elu(alpha={alpha})", exact, functools.cache(code))


@functools.cache
def _leaky_relu(slope: float) -> Forms:
    def value(x):
        return jax.nn.leaky_relu(x, slope)

    def derivative(y):
        return jnp.where(y >= 0, 1.0, slope)

    bit = coded("leaky_relu", value, (0.0,), (slope, 1.0))
    exact = {
        "input": lean("leaky_relu", value, derivative, of_input),
        "output": lean("leaky_relu", value, derivative, of_output),
        "bit": bit,
    }
    key = f"leaky_relu(negative_slope={slope})"
    return Forms(key, exact, lambda bits: bit, free_bits=1)


def relu(
    x: Shaped[ArrayLike, "*shape"],
    *,
    save: str | int = "output",
    bits: int | None = None,
) -> Num[Array, "*shape"]:
    """Rectified linear unit max(x, 0), as `jax.nn.relu`; its derivative at 0 is 0.

    Args:
        x: input of any shape; integers stay integers.
        save: what the backward pass keeps: "output", "input", a "bit" (or 1), or
            "auto", as in `gelu`, with a bit where nobody keeps the output. All are
            exact, except
            that to the bit any x below 1e-38 is zero.
        bits: as in `gelu`; 1 is enough, and all that is kept.

    Returns:
        Array of the shape and dtype of x.

    Raises:
        ValueError: `save` or bits out of range, or bits without "auto".
        TypeError: x is complex, or no array.

    Saves:
        The output alone, or 1/8 byte an element.

    Source:
        Nair and Hinton, Rectified linear units improve restricted Boltzmann machines,
        section 2.
    """
    integer = isinstance(x, int) or jnp.issubdtype(
        getattr(x, "dtype", jnp.float32), jnp.integer
    )
    if integer and not isinstance(x, bool):
        return _rectified(jnp.asarray(x))
    return _RELU.op(save, bits)(inexact("relu", x))


def elu(
    x: Shaped[ArrayLike, "*shape"],
    alpha: ArrayLike = 1.0,
    *,
    save: str | int = "output",
    bits: int | None = None,
) -> Float[Array, "*shape"]:
    """Exponential linear unit, as `jax.nn.elu`.

    Args:
        x: input of any shape; integers become floats.
        alpha: minus the limit at minus infinity; a number or a (differentiable) array.
        save: what the backward pass keeps: "output" or "input", exact; a number of
            bits from 1 to 8, with a derivative off by 0.035 at 2 bits, 0.016 at 3,
            0.008 at 4 (root mean square over -10 .. 10); or "auto", as in `gelu`.
            "output" or "input" if alpha is no positive number.
        bits: of the code, for save="auto".

    Returns:
        Array of the shape and dtype of x.

    Raises:
        ValueError: `save` or bits out of range, or bits without "auto".
        TypeError: x is complex, or no array.

    Saves:
        The output alone where alpha is a positive number, or bits/8 byte
        an element. Else x (and alpha).

    Source:
        Clevert et al., arXiv 1511.07289, section 3.
    """
    x, alpha = inexact("elu", x), check_scalar("elu: alpha", alpha)
    if _positive_number(alpha):
        return _elu(float(alpha)).op(save, bits)(x)
    _check_words("elu", "alpha", save, bits)
    return _recomputed("elu", jax.nn.elu)(x, alpha)


def leaky_relu(
    x: Shaped[ArrayLike, "*shape"],
    negative_slope: ArrayLike = 0.01,
    *,
    save: str | int = "output",
    bits: int | None = None,
) -> Float[Array, "*shape"]:
    """x where it is not negative, else negative_slope x, as `jax.nn.leaky_relu`.

    Args:
        x: input of any shape; integers become floats.
        negative_slope: a number or a (differentiable) array.
        save: what the backward pass keeps: "output", "input", a "bit" (or 1), or
            "auto", as in `gelu`, with a bit where nobody keeps the output. All are
            exact.
            "output" or "input" if negative_slope is no positive number.
        bits: as in `gelu`; 1 is enough, and all that is kept.

    Returns:
        Array of the shape and dtype of x.

    Raises:
        ValueError: `save` or bits out of range, or bits without "auto".
        TypeError: x is complex, or no array.

    Saves:
        The output alone where negative_slope is a positive number, or 1/8 byte
        an element. Else x (and negative_slope).

    Source:
        Maas et al., Rectifier nonlinearities improve neural network acoustic models,
        section 2.
    """
    x = inexact("leaky_relu", x)
    negative_slope = check_scalar("leaky_relu: negative_slope", negative_slope)
    if _positive_number(negative_slope):
        return _leaky_relu(float(negative_slope)).op(save, bits)(x)
    _check_words("leaky_relu", "negative_slope", save, bits)
    return _recomputed("leaky_relu", jax.nn.leaky_relu)(x, negative_slope)


def _positive_number(value) -> TypeGuard[SupportsFloat]:
    real = isinstance(value, numbers.Real)
    return real and value > 0  # pyright: ignore[reportOperatorIssue]


@functools.cache
def _recomputed(name, plain):
    """`plain(x, parameter)`, keeping no more than its arguments."""

    def op(x, parameter):
        return plain(x, parameter).astype(x.dtype)

    return recomputed(name, op)


def _check_words(name: str, parameter: str, save, bits) -> None:
    if save not in ("input", "output") or bits is not None:
        raise ValueError(
            f'{name}: save must be "input" or "output" where {parameter} is no '
            f"positive number, got save={save!r}, bits={bits!r}"
        )


_DOC = """{what}.

Args:
    x: input of any shape; integers become floats.
    save: what the backward pass keeps: {words}, exact; a number of bits from 1 to 8,
        {errors} (root mean square over -10 .. 10); or "auto", as in `gelu`.
    bits: of the code, for save="auto".

Returns:
    Array of the shape and dtype of x, computed in float32 and rounded once.

Raises:
    ValueError: `save` or bits out of range, or bits without "auto".
    TypeError: x is complex, or no array.

Saves:
    {saves} Or bits/8 byte an element.

Source:
    {source}
"""


def _public(forms: Forms, what: str, errors: str, saves: str, source: str):
    """The op of these forms, for those that differ in nothing else."""

    # Without a result annotated: a type checker then sees the signature of `op`.
    def op(
        x: Shaped[ArrayLike, "*shape"],
        *,
        save: str | int = forms.shared,
        bits: int | None = None,
    ) -> Float[Array, "*shape"]:
        return forms.op(save, bits)(inexact(forms.name, x))

    op.__name__ = op.__qualname__ = forms.name
    words = " or ".join(f'"{word}"' for word in [*forms.exact][::-1])
    op.__doc__ = _DOC.format(
        what=what, words=words, errors=errors, saves=saves, source=source
    )
    return op


squared_relu = _public(
    _monotone("squared_relu", lambda x: _rectified(x) ** 2, _squared_relu_slope),
    "max(x, 0) squared",
    "for inputs up to 10 alone, beyond which the derivative stays below 20: off by 1.2 "
    "at 2 bits, 0.55 at 3, 0.27 at 4",
    "The output alone; the derivative is twice its root.",
    "So et al., Primer, arXiv 2109.08668, section 4.1.",
)
softplus = _public(
    _monotone("softplus", jax.nn.softplus, lambda y: -jnp.expm1(-y)),
    "log(1 + exp(x)), as `jax.nn.softplus`",
    "with a derivative off by 0.052 at 2 bits, 0.025 at 3, 0.012 at 4",
    "The output y alone; the derivative is 1 - exp(-y).",
    "Dugas et al., Incorporating second-order functional knowledge for better option "
    "pricing, section 3.",
)
mish = _public(
    forms(
        "mish",
        jax.nn.mish,
        {"input": lean("mish", jax.nn.mish, _mish_slope, of_input)},
        "mish",
    ),
    "x tanh(softplus(x)), as `jax.nn.mish`",
    "with a derivative off by 0.045 at 2 bits, 0.026 at 3, 0.013 at 4",
    "x alone.",
    "Misra, arXiv 1908.08681, section 2.",
)
tanh = _public(
    _monotone("tanh", jnp.tanh, lambda y: (1 + y) * (1 - y)),
    "Hyperbolic tangent, as `jax.numpy.tanh`",
    "with a derivative off by 0.075 at 2 bits, 0.036 at 3, 0.018 at 4",
    "The output alone; the derivative is 1 - y squared.",
    "`jax.numpy.tanh`, which keeps its output and one array more.",
)
sigmoid = _public(
    _monotone("sigmoid", jax.nn.sigmoid, lambda y: y * (1 - y)),
    "1 / (1 + exp(-x)), as `jax.nn.sigmoid`",
    "with a derivative off by 0.026 at 2 bits, 0.012 at 3, 0.006 at 4",
    "The output y alone; the derivative is y (1 - y).",
    "`jax.nn.sigmoid`, which keeps its output and one array more.",
)
