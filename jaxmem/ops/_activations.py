"""Activations that keep one array for the backward pass.

Monotone ones keep their output, from which the derivative follows in a step or two;
the matmul after it keeps the same array, so they cost nothing of their own there.
`mish` keeps its input. `jax.nn.relu` keeps a mask of a byte an element and an array
of zeros, `softplus` and `mish` several arrays.

ReLU keeps its output and not a packed bit: before a matmul or a convolution, where it
mostly stands, the output is kept anyway and a bit would come on top.

Where the output is rounded, so is what follows from it: near saturation the
derivatives of `tanh`, `sigmoid`, `softplus` and `elu` carry the absolute rounding
error of the output (as those of `jax.numpy.tanh` do).
"""

import functools
import numbers
from typing import SupportsFloat, TypeGuard

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Num, Shaped

from jaxmem.ops._elementwise import inexact, lean, of_input, of_output

FAR = 1e4  # beyond it the derivative is its limit


def _rectified(x):
    return jnp.maximum(x, jnp.zeros((), x.dtype))


def _is_positive(y):
    return (y > 0).astype(y.dtype)


def _squared_relu_slope(y):
    positive = y > 0
    return jnp.where(positive, 2 * jnp.sqrt(jnp.where(positive, y, 1.0)), 0.0)


def _mish_slope(x):
    x = jnp.clip(x, -FAR, FAR)
    t = jnp.tanh(jax.nn.softplus(x))
    return t + x * (1 - t * t) * jax.nn.sigmoid(x)


_relu = lean("relu", _rectified, _is_positive, of_output)
_squared_relu = lean(
    "squared_relu", lambda x: _rectified(x) ** 2, _squared_relu_slope, of_output
)
_softplus = lean("softplus", jax.nn.softplus, lambda y: -jnp.expm1(-y), of_output)
_mish = lean("mish", jax.nn.mish, _mish_slope, of_input)
_tanh = lean("tanh", jnp.tanh, lambda y: (1 + y) * (1 - y), of_output)
_sigmoid = lean("sigmoid", jax.nn.sigmoid, lambda y: y * (1 - y), of_output)


def relu(x: Shaped[ArrayLike, "*shape"]) -> Num[Array, "*shape"]:
    """Rectified linear unit max(x, 0), as `jax.nn.relu`; its derivative at 0 is 0.

    Args:
        x: input of any shape; integers stay integers.

    Returns:
        Array of the shape and dtype of x.

    Raises:
        TypeError: x is complex, or no array.

    Saves:
        The output alone.

    Source:
        Nair and Hinton, Rectified linear units improve restricted Boltzmann machines,
        section 2.
    """
    if jnp.issubdtype(jnp.result_type(x), jnp.integer):
        return _rectified(jnp.asarray(x))
    return _relu(inexact("relu", x))


def squared_relu(x: Shaped[ArrayLike, "*shape"]) -> Float[Array, "*shape"]:
    """max(x, 0) squared.

    Args:
        x: input of any shape; integers become floats.

    Returns:
        Array of the shape and dtype of x, computed in float32 and rounded once.

    Raises:
        TypeError: x is complex, or no array.

    Saves:
        The output alone; the derivative is twice its root.

    Source:
        So et al., Primer, arXiv 2109.08668, section 4.1.
    """
    return _squared_relu(inexact("squared_relu", x))


def softplus(x: Shaped[ArrayLike, "*shape"]) -> Float[Array, "*shape"]:
    """log(1 + exp(x)), as `jax.nn.softplus`.

    Args:
        x: input of any shape; integers become floats.

    Returns:
        Array of the shape and dtype of x, computed in float32 and rounded once.

    Raises:
        TypeError: x is complex, or no array.

    Saves:
        The output y alone; the derivative is 1 - exp(-y).

    Source:
        Dugas et al., Incorporating second-order functional knowledge for better
        option pricing, section 3.
    """
    return _softplus(inexact("softplus", x))


@functools.cache
def _elu(alpha: float):
    return lean(
        "elu",
        lambda x: jax.nn.elu(x, alpha),
        lambda y: jnp.where(y > 0, 1.0, y + alpha),
        of_output,
    )


def elu(
    x: Shaped[ArrayLike, "*shape"], alpha: ArrayLike = 1.0
) -> Float[Array, "*shape"]:
    """Exponential linear unit, as `jax.nn.elu`.

    Args:
        x: input of any shape; integers become floats.
        alpha: minus the limit at minus infinity; a number or a (differentiable) array.

    Returns:
        Array of the shape and dtype of x.

    Raises:
        TypeError: x is complex, or no array.

    Saves:
        The output alone where alpha is a positive number. Else x (and alpha).

    Source:
        Clevert et al., arXiv 1511.07289, section 3.
    """
    x = inexact("elu", x)
    if _positive_number(alpha):
        return _elu(float(alpha))(x)
    return _recomputed("elu", jax.nn.elu)(x, alpha)


@functools.cache
def _leaky_relu(slope: float):
    return lean(
        "leaky_relu",
        lambda x: jax.nn.leaky_relu(x, slope),
        lambda y: jnp.where(y >= 0, 1.0, slope),
        of_output,
    )


def leaky_relu(
    x: Shaped[ArrayLike, "*shape"], negative_slope: ArrayLike = 0.01
) -> Float[Array, "*shape"]:
    """x where it is not negative, else negative_slope x, as `jax.nn.leaky_relu`.

    Args:
        x: input of any shape; integers become floats.
        negative_slope: a number or a (differentiable) array.

    Returns:
        Array of the shape and dtype of x.

    Raises:
        TypeError: x is complex, or no array.

    Saves:
        The output alone where negative_slope is a positive number. Else x (and
        negative_slope).

    Source:
        Maas et al., Rectifier nonlinearities improve neural network acoustic models,
        section 2.
    """
    x = inexact("leaky_relu", x)
    if _positive_number(negative_slope):
        return _leaky_relu(float(negative_slope))(x)
    return _recomputed("leaky_relu", jax.nn.leaky_relu)(x, negative_slope)


def mish(x: Shaped[ArrayLike, "*shape"]) -> Float[Array, "*shape"]:
    """x tanh(softplus(x)), as `jax.nn.mish`.

    Args:
        x: input of any shape; integers become floats.

    Returns:
        Array of the shape and dtype of x, computed in float32 and rounded once.

    Raises:
        TypeError: x is complex, or no array.

    Saves:
        x alone.

    Source:
        Misra, arXiv 1908.08681, section 2.
    """
    return _mish(inexact("mish", x))


def tanh(x: Shaped[ArrayLike, "*shape"]) -> Float[Array, "*shape"]:
    """Hyperbolic tangent, as `jax.numpy.tanh`.

    Args:
        x: input of any shape; integers become floats.

    Returns:
        Array of the shape and dtype of x, computed in float32 and rounded once.

    Raises:
        TypeError: x is complex, or no array.

    Saves:
        The output alone; the derivative is 1 - y squared.

    Source:
        `jax.numpy.tanh`, which keeps its output and one array more.
    """
    return _tanh(inexact("tanh", x))


def sigmoid(x: Shaped[ArrayLike, "*shape"]) -> Float[Array, "*shape"]:
    """1 / (1 + exp(-x)), as `jax.nn.sigmoid`.

    Args:
        x: input of any shape; integers become floats.

    Returns:
        Array of the shape and dtype of x, computed in float32 and rounded once.

    Raises:
        TypeError: x is complex, or no array.

    Saves:
        The output y alone; the derivative is y (1 - y).

    Source:
        `jax.nn.sigmoid`, which keeps its output and one array more.
    """
    return _sigmoid(inexact("sigmoid", x))


def _positive_number(value) -> TypeGuard[SupportsFloat]:
    real = isinstance(value, numbers.Real)
    return real and value > 0  # pyright: ignore[reportOperatorIssue]


@functools.cache
def _recomputed(name, plain):
    """`plain(x, parameter)`, keeping no more than its arguments."""

    def op(x, parameter):
        with jax.named_scope(f"jaxmem.{name}"):
            return plain(x, parameter).astype(x.dtype)

    return jax.checkpoint(op, prevent_cse=False)
