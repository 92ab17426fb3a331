"""The inverse root of a Gram matrix, by its eigenvalues."""

from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32


def inverse_root(
    gram: Float32[Array, "n n"],
    order: Literal[2, 4],
    eps: Any,
    rounded: bool = False,
) -> Float32[Array, "n n"]:
    """(gram + eps)^(-1/order), of a Gram matrix that roundings made indefinite or not.

    A negative smallest eigenvalue is subtracted from all of them, so that none is below
    eps. Where the elements are `rounded`, that would leave eps, and a direction of
    nothing but rounding would be the largest of the root: there eigenvalues smaller
    than the most negative one is large, which cannot be told from it, count as that.
    """
    values, vectors = jnp.linalg.eigh(gram)
    below = jnp.maximum(-values[0], 0.0)
    values = jnp.maximum(values, below) if rounded else values + below
    roots = lax.rsqrt(values + eps)
    scaled = vectors * (roots if order == 2 else jnp.sqrt(roots))[None]
    return jnp.matmul(scaled, vectors.T, precision=lax.Precision.HIGHEST)
