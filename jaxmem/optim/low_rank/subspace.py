"""The subspace of a gradient's largest singular values: exactly, or by iteration."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, UInt32

from jaxmem.optim.low_rank.noise import gaussian
from jaxmem.optim.low_rank.sides import dot

Subspace = Literal["randomized", "svd"]
_NOISE = 0.1  # of the length of a vector; see `_iterated`


def left_vectors(
    g: Float32[Array, "*batch m n"],
    old: Float32[Array, "*batch rank m"],
    seeds: UInt32[Array, "*batch"],
    subspace: Subspace,
    iterations: int,
) -> Float32[Array, "*batch rank m"]:
    """Orthonormal vectors in rows, which span what `g` mostly maps to.

    Each vector points as the old one does rather than away from it: the sign of a
    singular vector is arbitrary, and moments outlive the projector.

    Args:
      g: gradients.
      old: the vectors until now; zeros the first time.
      seeds: one a matrix, for the iteration to begin with.
      subspace: "svd", the first singular vectors; "randomized", subspace iteration.
      iterations: of the latter.
    """
    if g.ndim > 2 and _waits_in_pool():
        one = lambda item: left_vectors(*item, subspace, iterations)
        return lax.map(one, (g, old, seeds))
    rank = old.shape[-2]
    if subspace == "svd":
        u = lax.linalg.svd(g, full_matrices=False)[0]
        new = u[..., :rank].mT
    else:
        new = _iterated(g, old, seeds, iterations).mT
    against = jnp.sum(new * old, axis=-1, keepdims=True) < 0
    return jnp.where(against, -new, new)


def _waits_in_pool() -> bool:
    """Whether a decomposition of several matrices may wait for ever."""
    # On CPU it sends parts to XLA's pool, and waits in a thread of the pool: with all
    # threads taken by as many devices, after a collective, nobody does the parts.
    return jax.default_backend() == "cpu" and jax.local_device_count() > 1


def _iterated(g, old, seeds, iterations: int):
    """Subspace iteration (Halko et al. 2011, algorithm 4.4) from the old subspace."""
    # It begins at the old vectors, so that each stays near its place, with noise, so
    # that a direction to which all of them are orthogonal is found.
    rank, m = old.shape[-2:]
    noise = gaussian(seeds, m, rank)
    vectors = old.mT + noise * (_NOISE / m**0.5)
    exact = lax.Precision.HIGHEST  # it runs once in `gap` steps
    for _ in range(iterations):
        rows = _orthonormal(dot(g, vectors, -2, -2, exact))
        vectors = _orthonormal(dot(g, rows, -1, -2, exact))
    return vectors


def _orthonormal(x):
    return lax.linalg.qr(x, full_matrices=False)[0]
