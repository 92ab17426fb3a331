"""Orthonormal eigenvectors of a Gram matrix: exactly, and by one power iteration."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

_LIFT = 1e-30  # of a matrix of zeros


def eigenbasis(gram: Float32[Array, "n n"]) -> Float32[Array, "n n"]:
    """Eigenvectors in columns, those of the largest eigenvalues first."""
    lift = _LIFT * jnp.eye(len(gram), dtype=jnp.float32)
    return jnp.linalg.eigh(gram + lift)[1][:, ::-1]


def iterated(
    gram: Float32[Array, "n n"], basis: Float32[Array, "n n"]
) -> tuple[Float32[Array, "n n"], Int32[Array, " n"]]:
    """The basis after one power iteration and a QR, and where its columns were.

    The columns are sorted by their Rayleigh quotients first, the largest first.
    """
    exact = lax.Precision.HIGHEST  # it runs once in several steps
    power = jnp.matmul(gram, basis, precision=exact)
    quotients = jnp.sum(basis * power, axis=0)
    order = jnp.argsort(-quotients)
    return jnp.linalg.qr(power[:, order])[0], order


def rotated(
    x: Float32[Array, "m n"],
    left: Float32[Array, "m m"] | None,
    right: Float32[Array, "n n"] | None,
) -> Float32[Array, "m n"]:
    """left^T x right; None is the identity."""
    x = x if left is None else left.T @ x
    return x if right is None else x @ right


def rotated_back(
    x: Float32[Array, "m n"],
    left: Float32[Array, "m m"] | None,
    right: Float32[Array, "n n"] | None,
) -> Float32[Array, "m n"]:
    """left x right^T, the inverse of `rotated`."""
    x = x if left is None else left @ x
    return x if right is None else x @ right.T
