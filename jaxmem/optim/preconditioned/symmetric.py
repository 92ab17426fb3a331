"""Symmetric matrices in float32, bfloat16, or 8-bit codes with their diagonal apart.

A Gram matrix is a sum of many small steps, which rounding to the nearest would lose: it
is rounded stochastically, without bias. Its diagonal is larger than the rest, and would
take most of the codes; it stays in float32 (as in 4-bit Shampoo, arXiv 2405.18144).
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
      rest: `ProjectorCodes` of the matrix without its diagonal, [..., n, n].
    """

    diagonal: Float32[Array, "*batch n"]
    rest: Any


def empty_symmetric(
    shape: tuple[int, ...], kind: PreconditionerDType, zeros: Zeros
) -> Any:
    """A stored matrix of zeros; `zeros` makes an array of a shape and a dtype."""
    whole = empty(shape, kind, zeros)
    if kind != "int8":
        return whole
    return SymmetricCodes(zeros(shape[:-1], "float32"), whole)


def store_symmetric(
    x: Float32[Array, "n n"],
    kind: PreconditionerDType,
    seed: UInt32[Array, ""] | None = None,
) -> Any:
    """The matrix as it is kept; with a seed it is rounded stochastically."""
    if kind == "float32":
        return x
    bits = None if seed is None else counter_bits(seed, x.shape)
    if kind != "int8":
        return store(x, kind, bits)
    diagonal = jnp.diagonal(x)
    off = jnp.where(jnp.eye(len(x), dtype=bool), jnp.zeros_like(x), x)
    return SymmetricCodes(diagonal, store(off, kind, bits))


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
        return x if stored.dtype == jnp.float32 else _mean(x)
    n = stored.diagonal.shape[-1]
    off = _mean(load(stored.rest, n))
    return jnp.where(jnp.eye(n, dtype=bool), stored.diagonal[:, None], off)


def _mean(x):
    """Symmetric again: both halves are rounded each for itself."""
    return (x + x.T) / 2
