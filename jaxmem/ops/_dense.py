"""A dense layer that keeps no cast copy of its kernel.

With float32 parameters and bfloat16 compute, plain JAX keeps the bfloat16 cast of the
kernel for the backward pass: half the parameters' bytes again, in a scan over layers
stacked. Here the cast and the product stand under `jax.checkpoint`: the kernel itself
is kept (it is an argument, and so free) and cast again. A backward pass without a
product to repeat costs no more matmul than the plain one. (In unrolled layers on
H100 XLA keeps no cast copies of the plain layer either: there both take the same.)
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Inexact, Num

from jaxmem.ops._moments import canonical_axes


def dense(
    x: Num[Array, "..."],
    kernel: Num[Array, "..."],
    bias: Num[Array, "..."] | None = None,
    *,
    axis: int | Sequence[int] = -1,
    dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Inexact[Array, "..."]:
    """`x @ kernel + bias`, contracting any axes, as `flax.linen.DenseGeneral`.

    Args:
        x: the input.
        kernel: shape `(*contracted, *features)`: its leading axes are the sizes of
            x's `axis`, in the order in which `axis` names them.
        bias: shape `(*features,)`, or None.
        axis: the axis or axes of x to contract.
        dtype: to compute in; None: the dtype that x, kernel and bias promote to (at
            least a floating one).
        precision: of the product, as for `jax.lax.dot_general`.
        preferred_element_type: of the product, as for `jax.lax.dot_general`.

    Returns:
        Shape `(*x without the contracted axes, *features)`, in `dtype` (or
        `preferred_element_type`).

    Raises:
        ValueError: an axis out of range or named twice, sizes that do not fit, or a
            dtype that is not floating or complex.

    Saves:
        x in `dtype`, where the kernel is trained; the kernel as it is given, an
        argument, where x is differentiated; for bias nothing.

    Source:
        `jax.checkpoint` round the cast and the product; "Not storing casts":
        mixed-precision training, Micikevicius et al. 2018, arXiv 1710.03740, keeps
        one master copy of the weights and casts in each pass.
    """
    axes = _axes(axis, x.ndim)
    _check_shapes(x, kernel, bias, axes)
    dtype = _compute_dtype(dtype, x, kernel, bias)
    with jax.named_scope("jaxmem.dense"):
        # Cast outside: kept in `dtype`, as plain JAX does, and not wider.
        y = _product(axes, precision, preferred_element_type)(x.astype(dtype), kernel)
        if bias is None:
            return y
        return y + jnp.broadcast_to(bias.astype(dtype), y.shape).astype(y.dtype)


def _axes(axis: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """Non-negative axes in the order given, which is that of the kernel's axes."""
    canonical_axes(axis, ndim)
    return tuple(a % ndim for a in ((axis,) if isinstance(axis, int) else axis))


def _check_shapes(x, kernel, bias, axes: tuple[int, ...]) -> None:
    contracted = tuple(x.shape[a] for a in axes)
    if kernel.shape[: len(axes)] != contracted:
        raise ValueError(
            f"dense: kernel of shape {kernel.shape} must start with {contracted}, "
            f"the sizes of axes {axes} of x {x.shape}"
        )
    features = kernel.shape[len(axes) :]
    if bias is not None and bias.shape != features:
        raise ValueError(
            f"dense: bias has shape {bias.shape}, the kernel's features are {features}"
        )


def _compute_dtype(dtype: DTypeLike | None, *arrays: Array | None):
    """What the arrays promote to; promotion here is meant, and so not strict."""
    if dtype is None:
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.result_type(*(a.dtype for a in arrays if a is not None))
            if not jnp.issubdtype(dtype, jnp.inexact):
                dtype = jnp.promote_types(dtype, jnp.float32)
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(f"dense: dtype={dtype!r}, a floating or complex one is needed")
    return jnp.dtype(dtype)


@functools.cache
def _product(axes, precision, preferred_element_type) -> Callable:
    """(x, kernel) -> product, keeping the kernel as it is given."""

    def product(x, kernel):
        dims = ((axes, tuple(range(len(axes)))), ((), ()))
        return jax.lax.dot_general(
            x,
            kernel.astype(x.dtype),
            dims,
            precision=precision,
            preferred_element_type=preferred_element_type,
        )

    return jax.checkpoint(product, prevent_cse=False)
