"""The inverse root of a Gram matrix, by its eigenvalues."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32


def inverse_fourth_root(
    gram: Float32[Array, "n n"], eps: Any, rounded: bool = False
) -> Float32[Array, "n n"]:
    """(gram + eps)^(-1/4), of a Gram matrix that roundings may have made indefinite.

    A negative smallest eigenvalue is subtracted from all of them, so that none is below
    eps. Where the elements are `rounded`, that would leave eps, and a direction of
    nothing but rounding would be the largest of the root: there eigenvalues smaller
    than the most negative one is large, which cannot be told from it, count as that.
    """
    values, vectors = jnp.linalg.eigh(gram)
    below = jnp.maximum(-values[0], 0.0)
    values = jnp.maximum(values, below) if rounded else values + below
    scaled = vectors * jnp.sqrt(lax.rsqrt(values + eps))[None]
    return jnp.matmul(scaled, vectors.T, precision=lax.Precision.HIGHEST)
