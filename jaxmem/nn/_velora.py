"""The direction of a VeLoRA layer: which one a batch takes, which one is kept.

What is kept is a unit vector, or zeros before one is known: then it has the shape of
the vector, and no flag is stored beside it.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxmem import ops
from jaxmem.ops.common.blocks import vary_alike
from jaxmem.ops.sampled.velora import projection_if_any

METHODS = ("average", "ema", "svd")


def unknown(features: int, groups: int) -> jax.Array:
    """What is kept before a first batch."""
    x = jax.ShapeDtypeStruct((features,), jnp.float32)
    size = jax.eval_shape(lambda x: ops.velora_projection(x, groups), x)
    return jnp.zeros(size.shape, jnp.float32)


def found(x, groups: int, method: str) -> tuple[jax.Array, jax.Array]:
    """The direction of one batch, and whether the batch has any."""
    how = "svd" if method == "svd" else "average"
    vector, exists = projection_if_any(x, groups, how)
    return vector.astype(jnp.float32), exists


def direction(
    kept, x, *, groups: int, method: str, decay: float, trains: bool
) -> tuple[jax.Array, jax.Array]:
    """The unit vector that this batch takes; and what is to be kept.

    Zeros are kept as long as no batch had a direction: one of zeros alone has none.

    Args:
      kept: as described above, or None.
      x: the batch. Its own direction is taken where none is kept: a kept zero would
        make a gradient of zeros.
      groups, method, decay: as for the layers.
      trains: whether an "ema" moves.
    """
    own = partial(found, groups=groups, method=method)
    if kept is None:
        vector, _ = own(x)
        return vector, vector
    kept, x = vary_alike(kept, jax.lax.stop_gradient(x))
    is_known = jnp.any(kept != 0)
    if method == "ema" and trains:
        new, exists = own(x)
        moved, _ = projection_if_any(decay * kept + (1 - decay) * new, 1, "average")
        following = jnp.where(exists, jnp.where(is_known, moved, new), kept)
        return jnp.where(exists | is_known, following, new), following
    # the sums over the batch are computed in the first step alone
    keep = lambda kept, x: (kept, is_known)
    taken, exists = jax.lax.cond(is_known, keep, lambda _, x: own(x), kept, x)
    return taken, jnp.where(exists, taken, jnp.zeros_like(taken))
