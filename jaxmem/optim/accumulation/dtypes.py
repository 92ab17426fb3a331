"""The dtype to compute in."""

import jax.numpy as jnp


def accumulation_dtype(*arrays):
    """The widest floating or complex dtype of these arrays, but at least float32."""
    dtypes = [x.dtype for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]
    # float32 comes last, so that complex64, of as many bits a number, stays
    return max((*dtypes, jnp.dtype("float32")), key=lambda d: jnp.finfo(d).bits)
