"""Gaussian matrices that a counter makes: kept nowhere, computed where they are used.

An element depends on its matrix's seed and its place in the matrix alone, so it is the
same for a whole stack of layers and for one layer in a scan, and on any sharding.
"""

import math
import zlib

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt32

from jaxmem.optim.low_bit.random import mix

_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio, which spreads consecutive numbers


def seeds_of(
    seed: int, path: str, index: Int32[Array, ""], batch: tuple[int, ...]
) -> UInt32[Array, "*batch"]:
    """A seed for each matrix of a leaf.

    Args:
      seed: of the optimizer.
      path: of the leaf.
      index: which of the leaf's random matrices, such as the number of its refresh.
      batch: sizes of the leaf's leading axes.

    Returns:
      One number a matrix.
    """
    leaf = jnp.uint32(zlib.crc32(f"{seed}:{path}".encode()))
    leaf = mix(leaf ^ (index.astype(jnp.uint32) * jnp.uint32(_GOLDEN)))
    place = jnp.zeros(batch, jnp.uint32)
    for axis, size in enumerate(batch):
        along = lax.broadcasted_iota(jnp.uint32, batch, axis)
        place = place * jnp.uint32(size) + along
    return mix(place + jnp.broadcast_to(leaf, batch))


def gaussian(
    seeds: UInt32[Array, "*batch"], rows: int, columns: int
) -> Float32[Array, "*batch rows columns"]:
    """Standard normal matrices, one a seed."""
    shape = (*seeds.shape, rows, columns)
    own = (rows, columns)
    place = lax.broadcasted_iota(jnp.uint32, own, 0) * jnp.uint32(columns)
    place = place + lax.broadcasted_iota(jnp.uint32, own, 1)
    axes = tuple(range(seeds.ndim))
    place = lax.broadcast_in_dim(place, shape, (seeds.ndim, seeds.ndim + 1))
    seed = lax.broadcast_in_dim(seeds, shape, axes)
    # two rounds: one would make the matrices of two seeds permutations of each other
    bits = mix(mix(place ^ seed) + seed * jnp.uint32(_GOLDEN))
    # 23 bits and a half are exact in float32, and never 0 or 1
    uniform = (bits >> 9).astype(jnp.float32) * 2.0**-22 + (2.0**-23 - 1)
    return math.sqrt(2) * lax.erf_inv(uniform)
