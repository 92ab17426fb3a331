"""Elementwise ops that keep what we choose for the backward pass, and no more.

The derivative is made in the backward pass from one value: the input, the output, or
the output and a bit. Arithmetic is in float32 at least and rounded once at the end.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, ArrayLike, Float

from jaxmem._checks import check_array, wrong_type

# Beyond this input every derivative is its limit, and no power of it overflows.
FAR_OUT = 1e4


def wide_dtype(dtype: Any) -> Any:
    """The dtype to compute in: float32, or the dtype itself where that is wider."""
    return dtype if jnp.finfo(dtype).bits > 32 else jnp.dtype(jnp.float32)


def widen(x: Array) -> Array:
    """`x` in float32 if it is narrower."""
    return x.astype(wide_dtype(x.dtype))


@jax.custom_jvp
def reread(kept: Array) -> Array:
    """`widen` of what was rounded and stored, by bits."""
    # XLA takes float32 -> bfloat16 -> float32 for nothing and would, in unrolled code,
    # keep the value from before the rounding, in twice the bytes. A barrier stops that
    # too, but makes a TPU scan copy what it stored.
    if kept.dtype == jnp.bfloat16:
        # A bfloat16 is the upper half of a float32.
        half = lax.bitcast_convert_type(kept, jnp.uint16).astype(jnp.uint32)
        return lax.bitcast_convert_type(half << 16, jnp.float32)
    if kept.dtype == jnp.float16:
        return widen(lax.optimization_barrier(kept))
    return kept


@reread.defjvp
def _reread_jvp(primals, tangents):
    (kept,), (t,) = primals, tangents
    return reread(kept), widen(t) if t.dtype != jax.dtypes.float0 else t


def inexact(name: str, x: ArrayLike, argument: str = "x") -> Array:
    """`x` as an array of floats; integers and booleans become the default float."""
    if not isinstance(x, bool | int | float):
        check_array(f"{name}: {argument}", x)
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise wrong_type(f"{name}: {argument}", x, "an array or a scalar, real")
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return x.astype(jnp.result_type(float))


def recomputed(
    name: str, op: Callable[..., Array], *, prevent_cse: bool = False
) -> Callable[..., Array]:
    """`op`, keeping no more than its arguments; `prevent_cse` is for what XLA keeps."""
    op = jax.checkpoint(op, prevent_cse=prevent_cse)

    # The checkpoint inside of the scope: it is ours too.
    def scoped(*args):
        with jax.named_scope(f"jaxmem.{name}"):
            return op(*args)

    return scoped


def of_input(x: Array, y: Array) -> tuple[Array, ...]:
    """Keep the input."""
    return (x,)


def of_output(x: Array, y: Array) -> tuple[Array, ...]:
    """Keep the output."""
    return (y,)


def lean(
    name: str,
    value: Callable[[Array], Array],
    slope: Callable[..., Array],
    keep: Callable[[Array, Array], tuple[Array, ...]],
) -> Callable[[Float[Array, "*shape"]], Float[Array, "*shape"]]:
    """The op `value`, whose derivative is `slope(*keep(x, y))` in the backward pass."""

    def push(kept, t):
        # Float32 or wider, as `value`: what was kept is widened where it is a float.
        return slope(*map(reread, kept)) * widen(t)

    return kept_linear(name, value, push, keep)


def kept_linear(
    name: str,
    value: Callable[[Array], Array],
    push: Callable[[tuple[Array, ...], Array], Array],
    keep: Callable[[Array, Array], tuple[Array, ...]],
    *,
    narrow: bool = False,
) -> Callable[[Float[Array, "*shape"]], Float[Array, "*shape"]]:
    """The op `value`, whose tangent is `push(keep(x, y), t)`, linear in t.

    `narrow`: `value` rounds nothing, and is computed in the dtype of x: of a value that
    is rounded at its end, XLA gives readers that widen it the one before.
    """

    def forward(x):
        with jax.named_scope(f"jaxmem.{name}"):
            return value(x if narrow else widen(x)).astype(x.dtype)

    def tangent(kept, t):
        with jax.named_scope(f"jaxmem.{name}"):
            return push(kept, t).astype(t.dtype)

    # With a `custom_jvp` forward mode, Hessian-vector products, remat policies and
    # frozen inputs work as for plain JAX.
    op = jax.custom_jvp(forward)
    # Partial evaluation of a checkpoint keeps its arguments and nothing made inside: so
    # exactly what `keep` chose is a residual. No barriers (`prevent_cse`): the residual
    # may be the very value that the next operation keeps.
    scaled = jax.checkpoint(tangent, prevent_cse=False)

    @op.defjvp
    def rule(primals, tangents):
        (x,), (t,) = primals, tangents
        with jax.named_scope(f"jaxmem.{name}"):
            y = checkpoint_name(forward(x), f"jaxmem_{name}_output")
            return y, scaled(keep(x, y), t)

    return op
