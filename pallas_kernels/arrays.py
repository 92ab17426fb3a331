"""What all kernels do with arrays: dtypes, padding, and the types of their outputs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128  # elements in a row of a TPU's vector register


def like(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """The type of an output that varies over a `shard_map`'s mesh as `x` does."""
    kind = jax.typeof(x).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)


def float32(x):
    """`x` in the dtype that kernels compute in."""
    return x.astype(jnp.float32)


def dot(a, b, axes: tuple[int, int], precision=None):
    """The product of two matrices over an axis of each, in float32."""
    dims = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(
        a, b, dims, precision=precision, preferred_element_type=jnp.float32
    )


def padded(x: jax.Array, block: int, fill: float = 0.0) -> jax.Array:
    """`x` with `fill` appended to its last axis, up to a multiple of `block`."""
    missing = -x.shape[-1] % block
    if not missing:
        return x
    widths = [(0, 0)] * (x.ndim - 1) + [(0, missing)]
    return jnp.pad(x, widths, constant_values=jnp.asarray(fill, x.dtype))


def check_dtypes(allowed: tuple[str, ...], *arrays: Any) -> None:
    """Raises NotImplementedError for an array of a dtype that is not `allowed`."""
    others = sorted({x.dtype.name for x in arrays if x is not None} - set(allowed))
    if others:
        *first, last = allowed
        names = f"{', '.join(first)} and {last}" if first else last
        raise NotImplementedError(f"{names}, not {', '.join(others)}")
