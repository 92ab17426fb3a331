"""Random bits from a counter: a key and a position give 32 bits, and nothing is stored.

A position is a row and a column, each below 2**32; `pallas_kernels/hashing.py` has the
generator, whose bits are the same in XLA and in kernels.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt32

from jaxmem import _compat
from pallas_kernels import hashing
from pallas_kernels.hashing import threshold

_START = (np.uint32(0x9E3779B9), np.uint32(0x7F4A7C15))

# One equation each: the same operations, which would be most of a model's equations.
mix = _compat.word_operation("hash_mix", hashing.mix, 1)
_bits = _compat.word_operation(
    "position_bits", lambda k0, k1, r, c: hashing.random_bits((k0, k1), r, c), 4
)


def random_bits(seed, row, column) -> UInt32[Array, "..."]:
    """Bits at each position; `row` and `column` are uint32 and broadcast."""
    return _bits(seed[0], seed[1], row, column)


def seed_words(rng) -> UInt32[Array, "2"]:
    """Two words from a key: a typed key of any implementation, or a raw uint32 one."""
    typed = jnp.issubdtype(jnp.result_type(rng), jax.dtypes.prng_key)
    words = jax.random.key_data(rng) if typed else jnp.asarray(rng)
    if words.dtype != jnp.uint32 or words.ndim != 1:
        raise ValueError(
            "the random key must be one key, typed (jax.random.key) or raw "
            f"(jax.random.PRNGKey); got {jax.typeof(rng)}"
        )
    k0, k1 = jnp.asarray(_START[0]), jnp.asarray(_START[1])
    for i in range(words.shape[0]):
        k0 = mix(k0 ^ words[i])
        k1 = mix(k1 + k0)
    return jnp.stack([k0, k1])


def keep_mask(seed, row, column, rate: float) -> Bool[Array, "..."]:
    """True where kept, with probability `1 - rate`."""
    return random_bits(seed, row, column) >= threshold(rate)


def positions(shape: tuple[int, ...]):
    """(row, column) of an array: the column is the last axis, the row all others."""
    shape = shape or (1,)
    lead = (*shape[:-1], 1)
    row, stride = None, 1
    for axis in reversed(range(len(shape) - 1)):
        place = jax.lax.broadcasted_iota(jnp.uint32, lead, axis)
        # while all axes so far have length 1, they add nothing
        step = np.uint32(stride % 2**32)
        row = place if row is None or stride == 1 else row + place * step
        stride *= shape[axis]
    row = jnp.zeros(lead, jnp.uint32) if row is None else row
    last = (1,) * (len(shape) - 1) + shape[-1:]
    return row, jax.lax.broadcasted_iota(jnp.uint32, last, len(shape) - 1)
