"""The dtype to compute in."""

import jax.numpy as jnp


def wide(*arrays):
    """float32, or the widest dtype among these arrays where that is wider."""
    dtypes = (jnp.dtype(jnp.float32), *(x.dtype for x in arrays))
    return max(dtypes, key=lambda dtype: jnp.finfo(dtype).bits)
