"""Random bits from counters: a hash of the seed, the step, the leaf and the element.

The same element draws the same bits on one device and on many, and whether a stacked
leaf is updated as a whole or a layer at a time: there is no key to split, and nothing
but additions, multiplications and shifts of the element's index. The index along the
first axis is hashed on its own, as a vector, so that one layer of a stack needs one
element of it.
"""

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, UInt32

_GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio: neighbours land far apart


def seed_of(path: Any, seed: Any, *counts: Any) -> UInt32[Array, ""]:
    """The seed of a leaf at a step; `counts` are int32[], what numbers the step."""
    name = zlib.crc32(jax.tree_util.keystr(path).encode())
    mixed = jnp.asarray(seed, jnp.uint32) + jnp.uint32(name)
    for count in counts:
        mixed = mix(mixed * jnp.uint32(_GOLDEN) + jnp.asarray(count, jnp.uint32))
    return mix(mixed)


def counter_bits(
    seed: UInt32[Array, ""], shape: tuple[int, ...], lead: Any = None
) -> UInt32[Array, "..."]:
    """32 random bits an element.

    Args:
      seed: of `seed_of`.
      shape: of the result.
      lead: uint32, of the first axes of `shape`: the index of each row in the whole
        leaf. By default the index along the first axis.
    """
    if not shape:
        return mix(seed)
    lead = lax.iota(jnp.uint32, shape[0]) if lead is None else lead
    rows = mix(lead * jnp.uint32(_GOLDEN) + jnp.broadcast_to(seed, lead.shape))
    rows = lax.broadcast_in_dim(rows, shape, tuple(range(rows.ndim)))
    if rows.ndim == lead.ndim:
        return rows
    index = jnp.zeros(shape, jnp.uint32)
    for axis in range(lead.ndim, len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        index = index + lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    return mix(index ^ rows)


def uniform(bits: UInt32[Array, "*s"]) -> Float32[Array, "*s"]:
    """Numbers in [0, 1), multiples of 2**-24."""
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def mix(x):
    """A bijection of 32 bits in which each bit depends on all (lowbias32)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
