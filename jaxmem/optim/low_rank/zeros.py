"""Zeros for a state that is smaller than its parameter and is sharded as it is."""

import math

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem.ir.flatten import full_spec
from jaxmem.optim.low_rank.sides import Side, low_rank_shape


def zeros_along(
    p, shape: tuple[int, ...], dtype, axes: tuple[int | None, ...]
) -> jax.Array:
    """Zeros, sharded along the axes that are the parameter's as the parameter is.

    Args:
      p: the parameter, or its shape and dtype.
      shape: of the zeros.
      dtype: of the zeros.
      axes: for each of their axes, the parameter's that it runs along, or None. An axis
        that the devices do not divide is whole on each of them.
    """
    sharding = None if isinstance(p, jax.core.Tracer) else getattr(p, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(p, jax.Array):
        return jnp.zeros(shape, dtype)
    spec = full_spec(sharding, p.ndim)
    sizes = sharding.mesh.shape

    def along(axis: int | None, size: int):
        names = None if axis is None else spec[axis]
        if names is None:
            return None
        listed = (names,) if isinstance(names, str) else names
        return names if size % math.prod(sizes[n] for n in listed) == 0 else None

    new = PartitionSpec(*map(along, axes, shape))
    return jnp.zeros(shape, dtype, device=NamedSharding(sharding.mesh, new))


def low_rank_zeros(p, sides: tuple[Side, ...], rank: int) -> jax.Array:
    """Zeros as large as the projected gradient of a parameter, in float32."""
    axes: list[int | None] = [*range(p.ndim)]
    for side in sides:
        axes[-2 if side == "left" else -1] = None
    return zeros_along(p, low_rank_shape(sides, p.shape, rank), "float32", tuple(axes))
