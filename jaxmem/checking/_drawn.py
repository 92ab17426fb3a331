"""Arrays at random in the place of shapes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SCALE = 0.02  # of weights as they are initialized


def drawn(tree: Any) -> Any:
    """The pytree with an array instead of each `jax.ShapeDtypeStruct`.

    Floats are normal with a standard deviation of 0.02, what is named as a second
    moment not negative; all else is zero.
    """
    draw = np.random.default_rng(0)

    def array(path, x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), x.shape)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.zeros(x.shape, x.dtype)
        values = _SCALE * draw.standard_normal(x.shape)
        names = [getattr(key, "name", getattr(key, "key", "")) for key in path]
        return jnp.asarray(abs(values) if "nu" in names else values, x.dtype)

    return jax.tree_util.tree_map_with_path(array, tree)
