"""Random bits of a part of an array: those that the whole array would have.

Threefry is a function of a key and of a counter, and the counter of an element is its
place in the array, a number of 64 bits (`jax_threefry_partitionable`, JAX's default):
a part has the counters of its own places. (Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3"; nothing is held for the numbers that lie in between.)
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem import _compat
from jaxmem.ir.types import JaxprEqn

_WORD = 32
_LOW = 0xFFFF  # half of a word


def bits_of_part(eqn: JaxprEqn, key: Any, axis: int, size: int, start: Any) -> Any:
    """What a `random_bits` gives along `axis` from `start` on, `size` places.

    Args:
      eqn: the equation; its generator has `labels.draws_by_place`.
      key: its key, or its array of keys, whole.
      axis: of the output, behind the axes of the keys.
      size: the length of the part.
      start: uint32, a scalar that may be traced, or one for each place along `axis`.
    """
    out, whole = eqn.outvars[0].aval, eqn.params["shape"]
    shape = (*out.shape[:axis], size, *out.shape[axis + 1 :])
    counters = places(shape, whole, axis, start)
    keys = range(out.ndim - len(whole))
    broadcast = lambda x: lax.broadcast_in_dim(x, shape, keys) if x.ndim else x
    words = jax.random.key_data(key)
    first, second = (
        broadcast(lax.index_in_dim(words, k, -1, keepdims=False)) for k in range(2)
    )
    high, low = _compat.threefry2x32(first, second, *counters)
    return _compat.typed_as(_as_bits(high, low, out.dtype), out)


def _as_bits(high: jax.Array, low: jax.Array, dtype: Any) -> jax.Array:
    if dtype.itemsize * 8 <= _WORD:
        return (high ^ low).astype(dtype)
    return (high.astype(dtype) << np.array(_WORD, dtype)) | low.astype(dtype)


def places(
    shape: Sequence[int], whole: Sequence[int], axis: int, start: Any
) -> tuple[Any, Any]:
    """The high and the low word of each element's place in a whole array.

    Args:
      shape: of the part, with the axes of keys in front, which have no place.
      whole: the lengths of the last axes in the whole array.
      axis: which one begins at `start`, and not at 0.
      start: uint32, a scalar that may be traced, or one for each place along `axis`.
    """
    high = low = jnp.zeros(shape, jnp.uint32)
    for d, stride in enumerate(_strides(whole), len(shape) - len(whole)):
        index = lax.broadcasted_iota(jnp.uint32, shape, d)
        index = index + start if d == axis else index
        added = index * np.uint32(stride % 2**_WORD)
        low = low + added
        # else the high word is zero everywhere
        if math.prod(whole) > 2**_WORD:
            carry = (low < added).astype(jnp.uint32)
            high = high + _high_word(index, stride) + carry
    # under a `vmap` over where parts start threefry takes both words with its axis
    return high | (low & np.uint32(0)), low


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def _high_word(x: jax.Array, factor: int) -> Any:
    """The bits from the 32nd on of a product of a word and a number of 64 bits."""
    left, right = x >> 16, x & _LOW
    one, two = factor & _LOW, factor >> 16 & _LOW
    middle = (right * one >> 16) + left * one
    other = (middle & _LOW) + right * two
    high = left * two + (middle >> 16) + (other >> 16)
    return high + x * np.uint32(factor >> _WORD)
