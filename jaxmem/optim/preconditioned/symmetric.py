"""Symmetric matrices in float32, bfloat16, or 8-bit codes with their diagonal apart.

A Gram matrix is a sum of many small steps, which rounding to the nearest would lose: it
is rounded stochastically, without bias. Its diagonal is larger than the rest, and would
take most of the codes; it stays in float32 (as in 4-bit Shampoo, arXiv 2405.18144). Of
the rest one half is kept.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt32

from jaxmem.optim.low_bit.random import counter_bits
from jaxmem.optim.low_rank.stored import empty, load, store

PreconditionerDType = Literal["float32", "bfloat16", "int8"]
Zeros = Callable[[tuple[int, ...], Any], jax.Array]


class SymmetricCodes(NamedTuple):
    """A symmetric matrix in codes.

    Attributes:
      diagonal: float32[..., n].
      rest: `ProjectorCodes` of one half of the others, [..., 2 h, h] with h the half of
        n, rounded up; see `folded`.
    """

    diagonal: Float32[Array, "*batch n"]
    rest: Any


def empty_symmetric(
    shape: tuple[int, ...], kind: PreconditionerDType, zeros: Zeros
) -> Any:
    """A stored matrix of zeros; `zeros` makes an array of a shape and a dtype."""
    if kind != "int8":
        return empty(shape, kind, zeros)
    *batch, n = shape[:-1]
    half = -(-n // 2)
    rest = empty((*batch, 2 * half, half), kind, zeros)
    return SymmetricCodes(zeros(shape[:-1], "float32"), rest)


def store_symmetric(
    x: Float32[Array, "n n"],
    kind: PreconditionerDType,
    seed: UInt32[Array, ""] | None = None,
) -> Any:
    """The matrix as it is kept; with a seed it is rounded stochastically."""
    if kind == "float32":
        return x
    rest = folded(x) if kind == "int8" else x
    bits = None if seed is None else counter_bits(seed, rest.shape)
    stored = store(rest, kind, bits)
    return SymmetricCodes(jnp.diagonal(x), stored) if kind == "int8" else stored


def with_gradient(
    stored: Any,
    g: Float32[Array, "n k"],
    keep: Any,
    add: Any,
    kind: PreconditionerDType,
    seed: UInt32[Array, ""] | None,
) -> Any:
    """`keep` of a stored Gram matrix and `add` of a gradient's, as it is stored."""
    return store_symmetric(keep * load_symmetric(stored) + add * (g @ g.T), kind, seed)


def load_symmetric(stored: Any) -> Float32[Array, "n n"]:
    """The matrix of a stored one."""
    if not isinstance(stored, SymmetricCodes):
        x = load(stored, stored.shape[-1])
        # both halves are rounded each for itself
        return x if stored.dtype == jnp.float32 else (x + x.T) / 2
    n = stored.diagonal.shape[-1]
    off = unfolded(load(stored.rest, -(-n // 2)), n)
    return jnp.where(jnp.eye(n, dtype=bool), stored.diagonal[:, None], off)


def folded(x: Float32[Array, "n n"]) -> Float32[Array, "m h"]:
    """One of each two equal elements of a symmetric matrix, without its diagonal.

    Of the quarters [[a, b], [b^T, c]] it is b below a square, which has the elements
    above the diagonal of a and those below the diagonal of c. A row and a column of
    zeros make an odd n even.
    """
    h = -(-len(x) // 2)
    x = jnp.pad(x, (0, 2 * h - len(x)))
    square = jnp.triu(x[:h, :h], 1) + jnp.tril(x[h:, h:], -1)
    return jnp.concatenate([square, x[:h, h:]])


def unfolded(y: Float32[Array, "m h"], n: int) -> Float32[Array, "n n"]:
    """The symmetric matrix [n, n] of a folded one, with a diagonal of zeros."""
    square, b = jnp.split(y, 2)
    a, c = jnp.triu(square, 1), jnp.tril(square, -1)
    return jnp.block([[a + a.T, b], [b.T, c + c.T]])[:n, :n]
