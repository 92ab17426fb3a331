"""A dense layer that keeps no cast copy of its kernel.

With float32 parameters and bfloat16 compute, plain JAX keeps the bfloat16 cast of the
kernel for the backward pass. (In unrolled layers XLA for H100 keeps none.)
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Inexact, Num

from jaxmem._checks import (
    check_array,
    check_dtype,
    check_key,
    check_numbers,
    check_precision,
    wrong_value,
)
from jaxmem.ops.codes.quantization import SaveLike, bits_or_none
from jaxmem.ops.codes.readers import read_from_codes
from jaxmem.ops.codes.stored import Rng, Stored
from jaxmem.ops.norms.moments import canonical_axes
from jaxmem.ops.norms.ms_norm import Normalized


def dense(
    x: Num[Array, "..."] | Stored | Normalized,
    kernel: Num[Array, "..."],
    bias: Num[Array, "..."] | None = None,
    *,
    axis: int | Sequence[int] = -1,
    dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    save: SaveLike | None = None,
    save_rng: Rng = None,
) -> Inexact[Array, "..."]:
    """`x @ kernel + bias`, contracting any axes, as `flax.linen.DenseGeneral`.

    Args:
        x: the input; or `Stored`, an input with codes that other functions read too;
            or `Normalized`, the output of an MS norm, whose scale and bias are folded
            into the kernel.
        kernel: shape `(*contracted, *features)`: its leading axes are the sizes of
            x's `axis`, in the order in which `axis` names them.
        bias: shape `(*features,)`, or None.
        axis: the axis or axes of x to contract.
        dtype: to compute in; None: the dtype that x, kernel and bias promote to (at
            least a floating one).
        precision: of the product, as for `jax.lax.dot_general`.
        preferred_element_type: of the product, as for `jax.lax.dot_general`.
        save: bits a value (1 to 8), `jnp.float8_e4m3fn` or a `Quantization`: codes of x
            are kept instead of x. The output and the gradient of x are exact; the
            kernel's is off by the rounding of x, at most half a step, in float8 a
            sixteenth of each value. None keeps x.
        save_rng: a key for stochastic rounding, which makes the kernel's gradient
            unbiased; another each step. None: to the nearest code.

    Returns:
        Shape `(*x without the contracted axes, *features)`, in `dtype` (or
        `preferred_element_type`).

    Raises:
        ValueError: an axis out of range or named twice, sizes that do not fit, or a
            dtype that is not floating or complex.

    Saves:
        x in `dtype`, where the kernel is trained; the kernel as it is given, an
        argument, where x is differentiated; for bias nothing. With `save` the codes
        instead of x: bits / 8 byte an element, a step and an offset a block.

    Source:
        `jax.checkpoint` round the cast and the product; "Not storing casts":
        mixed-precision training, Micikevicius et al. 2018, arXiv 1710.03740, keeps
        one master copy of the weights and casts in each pass.
    """
    check_operands("dense", x, kernel, precision, preferred_element_type, save_rng)
    if x.ndim == 0:
        raise wrong_value("dense: x", x, "an array with at least one axis")
    axes = _axes(axis, x.ndim)
    _check_shapes(x, kernel, bias, axes)
    if isinstance(x, Normalized) and axes != (x.ndim - 1,):
        raise ValueError(f"dense: axis={axis!r} of a Normalized: only the last, -1")
    quantization = bits_or_none("dense", save)
    dtype = compute_dtype("dense", dtype, x, kernel, bias)
    with jax.named_scope("jaxmem.dense"):
        product = _product(axes, precision, preferred_element_type)
        # Cast outside: kept in `dtype`, as plain JAX does, and not wider.
        if isinstance(x, Normalized):
            y = x.into(product, kernel, dtype, quantization, save_rng)
        else:
            y = read_from_codes(
                product, x.astype(dtype), quantization, save_rng, kernel
            )
        if bias is None:
            return y
        return y + jnp.broadcast_to(bias.astype(dtype), y.shape).astype(y.dtype)


def _axes(axis: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """Non-negative axes in the order given, which is that of the kernel's axes."""
    canonical_axes(axis, ndim)
    return tuple(a % ndim for a in check_numbers("axis", axis))


def _check_shapes(x, kernel, bias, axes: tuple[int, ...]) -> None:
    contracted = tuple(x.shape[a] for a in axes)
    if kernel.shape[: len(axes)] != contracted:
        raise ValueError(
            f"dense: kernel of shape {kernel.shape} must start with {contracted}, "
            f"the sizes of axes {axes} of x {x.shape}"
        )
    features = kernel.shape[len(axes) :]
    if bias is not None and check_array("dense: bias", bias).shape != features:
        raise ValueError(
            f"dense: bias has shape {bias.shape}, the kernel's features are {features}"
        )


def compute_dtype(op: str, dtype: DTypeLike | None, *arrays: Any):
    """What the arrays promote to; promotion here is meant, and so not strict."""
    if dtype is not None:
        return check_dtype(f"{op}: dtype", dtype, "inexact")
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.result_type(*(a.dtype for a in arrays if a is not None))
        if not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(dtype, jnp.float32)
    return jnp.dtype(dtype)


def check_operands(
    op: str, x, kernel, precision, element_type: DTypeLike | None, save_rng: Rng
) -> None:
    """Errors for what no product takes, of `dense` or of `conv`."""
    for name, array in (("x", x), ("kernel", kernel)):
        check_array(f"{op}: {name}", array)
    check_precision(f"{op}: precision", precision)
    if element_type is not None:
        check_dtype(f"{op}: preferred_element_type", element_type, "number")
    if save_rng is not None:
        check_key("save_rng", save_rng)


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

    # The arguments of a checkpoint are kept, so the kernel and not its cast copy. A
    # backward pass without a product to repeat costs no more matmul than the plain one.
    return jax.checkpoint(product, prevent_cse=False)
