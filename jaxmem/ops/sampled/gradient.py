"""A product whose derivative in the kernel is made from something small of x."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxmem._checks import check_array, shown, wrong_value
from jaxmem.ops.linear.dense import dense


def with_kernel_gradient(
    keep: Callable,  # (x as [rows, D], extras) -> the residuals
    tangent: Callable,  # (residuals, rows, kernel's tangent) -> [rows, F], linear
    precision,
) -> Callable:
    """(x, kernel, extras) -> x @ kernel, in the dtype of x."""

    @jax.custom_jvp
    def apply(x, kernel, extras):
        return dense(x, kernel, dtype=x.dtype, precision=precision)

    def rule(primals: Any, tangents: Any):
        x, kernel, extras = primals
        x_dot, kernel_dot, _ = tangents
        y, parts = apply(x, kernel, extras), []
        if not isinstance(x_dot, SymbolicZero):
            parts.append(dense(x_dot, kernel, dtype=x.dtype, precision=precision))
        if not isinstance(kernel_dot, SymbolicZero):
            flat = x.reshape(-1, x.shape[-1])

            def part(kept, kernel_dot):
                return tangent(kept, flat.shape[0], kernel_dot.astype(x.dtype))

            # in a checkpoint: its arguments are kept, and no zeros, nor casts
            linear = jax.checkpoint(part, prevent_cse=False)
            parts.append(linear(keep(flat, extras), kernel_dot).reshape(y.shape))
        return y, sum(parts[1:], parts[0]) if parts else jnp.zeros_like(y)

    apply.defjvp(rule, symbolic_zeros=True)
    return apply


def product(a, b):
    """a @ b."""
    return jax.lax.dot_general(a, b, (((a.ndim - 1,), (0,)), ((), ())))


def check_product(op: str, x, kernel, bias) -> None:
    """Errors for arrays that make no product of [..., d] and [d, f]."""
    for name, array in (("x", x), ("kernel", kernel)):
        check_array(f"{op}: {name}", array, "floating")
    if kernel.ndim != 2:
        raise wrong_value(f"{op}: kernel", kernel, "an array of two axes")
    if x.ndim == 0 or x.shape[-1] != kernel.shape[0]:
        raise ValueError(
            f"{op}: x={shown(x)} must have as its last axis the first of "
            f"kernel={shown(kernel)}"
        )
    if bias is not None and check_array(f"{op}: bias", bias).shape != kernel.shape[1:]:
        raise wrong_value(f"{op}: bias", bias, f"of shape {kernel.shape[1:]}")


def add_bias(y, bias):
    """y + bias, in the dtype of y."""
    return y if bias is None else y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)
