"""The inverse root of a Gram matrix, by its eigenvalues."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32


def inverse_fourth_root(gram: Float32[Array, "n n"], eps) -> Float32[Array, "n n"]:
    """(gram + eps)^(-1/4), of a Gram matrix that roundings may have made indefinite.

    A negative smallest eigenvalue is added to all of them, so that none is below eps.
    """
    values, vectors = jnp.linalg.eigh(gram)
    values = values - jnp.minimum(values[0], 0.0) + eps
    scaled = vectors * jnp.sqrt(lax.rsqrt(values))[None]
    return jnp.matmul(scaled, vectors.T, precision=lax.Precision.HIGHEST)
