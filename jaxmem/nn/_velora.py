"""The direction of a VeLoRA layer: which one a batch takes, which one is kept.

What is kept is a unit vector, or zeros before one is known: then it has the shape of
the vector, and no flag is stored beside it.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxmem import ops
from jaxmem.ops.common.blocks import vary_alike

METHODS = ("average", "ema", "svd")


def unknown(features: int, groups: int) -> jax.Array:
    """What is kept before a first batch."""
    x = jax.ShapeDtypeStruct((features,), jnp.float32)
    size = jax.eval_shape(lambda x: ops.velora_projection(x, groups), x)
    return jnp.zeros(size.shape, jnp.float32)


def found(x, groups: int, method: str) -> jax.Array:
    """The direction of one batch."""
    how = "svd" if method == "svd" else "average"
    return ops.velora_projection(x, groups, how).astype(jnp.float32)


def direction(
    kept, x, *, groups: int, method: str, decay: float, trains: bool
) -> jax.Array:
    """The unit vector that this batch takes; to be kept, where the layer trains.

    Args:
      kept: as described above, or None.
      x: the batch. Its own direction is taken where none is kept: a kept zero would
        make a gradient of zeros.
      groups, method, decay: as for the layers.
      trains: whether an "ema" moves.
    """
    own = partial(found, groups=groups, method=method)
    if kept is None:
        return own(x)
    kept, x = vary_alike(kept, jax.lax.stop_gradient(x))
    is_known = jnp.any(kept != 0)
    if method == "ema" and trains:
        new = own(x)
        moved = decay * kept + (1 - decay) * new
        return jnp.where(is_known, ops.velora_projection(moved, 1), new)
    # the sums over the batch are computed in the first step alone
    return jax.lax.cond(is_known, lambda kept, x: kept, lambda _, x: own(x), kept, x)
