"""Norms whose normalised input is the very tensor that the next dense layer keeps.

The norm gives its normalised input with scale and bias beside it (`Normalized`), and
`dense` folds them into its weights, y W + b = xhat (diag(scale) W) + (b + bias W): xhat
is kept once, for both, and nothing is divided by a scale. (Yang et al., ICML 2024,
arXiv 2406.16282, section 4.3, merge once, before fine-tuning, and then cannot train
them.)
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxmem._checks import check_array, wrong_value
from jaxmem.ops.codes.quantization import (
    Quantization,
    SaveLike,
    as_quantization,
)
from jaxmem.ops.codes.readers import read_from_codes
from jaxmem.ops.codes.stored import Rng, WithArray
from jaxmem.ops.common.lean import wide_dtype, widen
from jaxmem.ops.norms.layer_norm import layer_norm, rms_norm
from jaxmem.ops.norms.moments import check_parameter


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["value", "scale", "bias"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Normalized(WithArray):
    """A normalised array; the next dense layer applies its scale and bias.

    Made by `ms_layer_norm` and `ms_rms_norm`; taken by `dense` instead of an array.
    `array()` is what a plain norm gives.

    Args:
        value: the normalised input.
        scale: one number for each element of the last axis, or None for ones.
        bias: as scale, or None for zeros.

    Saves:
        `value`, once for the norm and for all that read it.
    """

    value: Any
    scale: Any = None
    bias: Any = None

    def array(self) -> Array:
        """`value * scale + bias`, for what is no dense layer."""
        y = widen(self.value)
        if self.scale is not None:
            y = y * jnp.broadcast_to(self.scale.astype(y.dtype), y.shape)
        if self.bias is not None:
            y = y + jnp.broadcast_to(self.bias.astype(y.dtype), y.shape)
        return y.astype(self.dtype)

    def into(
        self,
        product: Callable,
        kernel: Array,
        dtype: Any,
        quantization: Quantization | None,
        rng: Rng,
    ) -> Array:
        """`product(array, kernel)`, with scale and bias folded into the kernel."""

        def folded(x, kernel, *scale):
            return product(x, merge_scale(kernel, None, *scale)[0])

        x = self.value.astype(dtype)
        scale = () if self.scale is None else (self.scale,)
        folded = jax.checkpoint(folded)
        given = kernel, *scale
        y = read_from_codes(folded, x, quantization, rng, *given, markable=False)
        if self.bias is None:
            return y
        # The gradients of scale and bias come out of the weights': no sum over the rows
        # for them, and a product an element of the weights in each pass.
        shift = jax.checkpoint(_shift)(self.bias, kernel)
        return y + jnp.broadcast_to(shift.astype(y.dtype), y.shape)


def _column(p: Array, kernel: Array) -> Array:
    """A vector of the kernel's first axis, against the whole kernel."""
    shape = p.shape + (1,) * (kernel.ndim - 1)
    return p.astype(wide_dtype(kernel.dtype)).reshape(shape)


def _shift(shift: Array, kernel: Array) -> Array:
    """shift @ kernel, in float32 whatever the platform's default for products."""
    return jnp.sum(_column(shift, kernel) * widen(kernel), axis=0)


def _check_merge(name: str, kernel, bias, scale, shift) -> None:
    check_array(f"{name}: kernel", kernel)
    if bias is not None and check_array("bias", bias).shape != kernel.shape[1:]:
        raise wrong_value(f"{name}: bias", bias, f"{kernel.shape[1:]}, as the kernel's")
    for what, p in (("scale", scale), ("shift", shift)):
        if p is not None and check_array(what, p).shape != kernel.shape[:1]:
            raise ValueError(
                f"{name}: {what} has shape {p.shape}, the kernel {kernel.shape} asks "
                f"for {kernel.shape[:1]}"
            )


def merge_scale(
    kernel: Float[Array, "..."],
    bias: Float[Array, "..."] | None,
    scale: Float[Array, "..."] | None = None,
    shift: Float[Array, "..."] | None = None,
) -> tuple[Float[Array, "..."], Float[Array, "..."] | None]:
    """A norm's scale and shift folded into the dense layer that follows it.

    `dense(x * scale + shift, kernel, bias)` is `dense(x, *merge_scale(...))`.

    Args:
        kernel: of the dense layer, the contracted axis first.
        bias: of the dense layer, or None for zeros.
        scale: of the norm, or None for ones.
        shift: the norm's bias, or None for zeros.

    Returns:
        Kernel and bias, in their dtypes; a bias (in that of the kernel) where there is
        a shift, even if none was given.

    Raises:
        ValueError: a scale or a shift that is no vector of the contracted axis.

    Saves:
        Nothing but its arguments.

    Source:
        Yang et al. 2024, arXiv 2406.16282, section 4.3.
    """
    _check_merge("merge_scale", kernel, bias, scale, shift)
    if shift is not None:
        add = _shift(shift, kernel)
        if bias is None:
            bias = add.astype(kernel.dtype)
        else:
            bias = bias + add.astype(bias.dtype)
    if scale is not None:
        kernel = (widen(kernel) * _column(scale, kernel)).astype(kernel.dtype)
    return kernel, bias


def unmerge_scale(
    kernel: Float[Array, "..."],
    bias: Float[Array, "..."] | None,
    scale: Float[Array, "..."] | None = None,
    shift: Float[Array, "..."] | None = None,
) -> tuple[Float[Array, "..."], Float[Array, "..."] | None]:
    """The inverse of `merge_scale`: takes scale and shift out of a merged dense layer.

    Args:
        kernel: the merged kernel, perhaps trained since.
        bias: the merged bias.
        scale: what was merged, or what shall stand in the norm.
        shift: likewise.

    Returns:
        Kernel and bias with which the norm of that scale and shift, and the dense
        layer after it, are the function that the merged pair is.

    Raises:
        ValueError: shapes that do not fit; a shift and no bias to take it from; a scale
            that is zero somewhere (told only of concrete arrays).

    Saves:
        Nothing but its arguments and the kernel.

    Source:
        Yang et al. 2024, arXiv 2406.16282, section 4.3.
    """
    _check_merge("unmerge_scale", kernel, bias, scale, shift)
    if scale is not None:
        if not isinstance(scale, jax.core.Tracer) and bool(jnp.any(scale == 0)):
            allowed = "without a zero, which cannot be divided out"
            raise wrong_value("unmerge_scale: scale", scale, allowed)
        kernel = (widen(kernel) / _column(scale, kernel)).astype(kernel.dtype)
    if shift is not None:
        if bias is None:
            raise ValueError("unmerge_scale: a shift, and no bias to take it from")
        bias = bias - _shift(shift, kernel).astype(bias.dtype)
    return kernel, bias


def ms_layer_norm(
    x: Float[Array, "..."],
    scale: Float[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    *,
    epsilon: float = 1e-6,
    use_fast_variance: bool = True,
    mask: Bool[Array, "..."] | None = None,
    dtype: DTypeLike | None = None,
    save: SaveLike = "output",
    save_rng: Rng = None,
) -> Normalized:
    """Layer normalisation over the last axis, to be read by `dense`.

    `dense(ms_layer_norm(x, scale, bias), kernel)` is `dense(layer_norm(x, scale,
    bias), kernel)`, and keeps one tensor where that keeps two.

    Args:
        x: the input, any shape.
        scale: one number for each element of the last axis, or None for ones.
        bias: as scale, or None for zeros.
        epsilon: added to the variance.
        use_fast_variance: variance as E[x^2] - E[x]^2 in one pass, clipped at zero.
        mask: which elements count in the statistics, broadcastable to x.
        dtype: of the output; None: that of x.
        save: "output"; or bits a value, or a `Quantization`, to keep codes of it.
        save_rng: a key for stochastic rounding of the codes.

    Returns:
        A `Normalized`.

    Raises:
        ValueError: parameters or a mask that do not fit x, another word for `save`.
        TypeError: x is not of a real floating dtype.

    Saves:
        The normalised input, which every `dense` that reads it keeps anyway, and where
        x moves 4 bytes a row. Exact: nothing is divided by a scale.

    Source:
        Yang et al. 2024, arXiv 2406.16282, section 4.3; scale and bias stay trainable
        here by folding them into the weights in each step.
    """
    options = dict(epsilon=epsilon, mask=mask, dtype=dtype, save=_checked(save))
    options |= dict(use_fast_variance=use_fast_variance, save_rng=save_rng)
    return _normalized("ms_layer_norm", layer_norm, x, scale, bias, options)


def ms_rms_norm(
    x: Float[Array, "..."],
    scale: Float[Array, "..."] | None = None,
    *,
    epsilon: float = 1e-6,
    mask: Bool[Array, "..."] | None = None,
    dtype: DTypeLike | None = None,
    save: SaveLike = "output",
    save_rng: Rng = None,
) -> Normalized:
    """Root mean square normalisation over the last axis, to be read by `dense`.

    Args:
        x: the input, any shape.
        scale: one number for each element of the last axis, or None for ones.
        epsilon: added to the mean square.
        mask: which elements count in the mean square, broadcastable to x.
        dtype: of the output; None: that of x.
        save: as in `ms_layer_norm`.
        save_rng: as in `ms_layer_norm`.

    Returns:
        A `Normalized`.

    Raises:
        ValueError: a scale or a mask that does not fit x, another word for `save`.
        TypeError: x is not of a real floating dtype.

    Saves:
        As `ms_layer_norm`.

    Source:
        Yang et al. 2024, arXiv 2406.16282, section 4.3.
    """
    options = dict(epsilon=epsilon, mask=mask, dtype=dtype, save=_checked(save))
    options |= dict(save_rng=save_rng)
    return _normalized("ms_rms_norm", rms_norm, x, scale, None, options)


def _checked(save: Any) -> Any:
    word = isinstance(save, str) and save == "output"
    if not word and as_quantization(save) is None:
        allowed = 'ms norms keep their output: "output" or bits'
        raise wrong_value("save", save, allowed)
    return save


def _normalized(name: str, norm: Callable, x, scale, bias, options) -> Normalized:
    check_array(f"{name}: x", x, "floating")
    for what, p in (("scale", scale), ("bias", bias)):
        check_parameter(name, what, p, x, tuple(range(x.ndim)[-1:]))
    with jax.named_scope(f"jaxmem.{name}"):
        return Normalized(norm(x, **options), scale, bias)
