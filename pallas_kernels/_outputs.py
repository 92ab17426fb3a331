"""What a kernel makes, as its call is told."""

from typing import Any

import jax


def like(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An output that varies over a `shard_map`'s mesh as `x` does."""
    kind = jax.typeof(x).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)
