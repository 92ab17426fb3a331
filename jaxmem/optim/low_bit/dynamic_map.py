"""bitsandbytes' dynamic 8-bit map, by arithmetic instead of a table of 256.

Seven decades, each cut into twice as many cells as the one below: decade i has 2**i
values a sign (2**(i+1) without signs), the midpoints of a uniform partition of
[0.1, 1], times 10**(i - 6). Beside them there are 0 and 1.0, but no -1.0. Let `q` count
the values from 0 upward, or from 1 without signs: then those of one decade are the `q`
in [2**e, 2**(e+1)), so that neither way needs a table.

A value in a decade is at most half a cell off, 0.45 / 2**e of the decade's top: 0.70 %
of the block's largest value with signs, 0.35 % without. The unsigned map holds 0: a
second moment below 1.6e-7 of its block's largest is lost, and the next step divides by
the root of the newest square alone. `companding` has a smallest code instead.

Source: bitsandbytes, `create_dynamic_map`; Dettmers et al., arXiv 2110.02861.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt8

_ZERO = 127  # the code of 0 with signs; 1.0 is 128 values above
_SIGNED, _UNSIGNED = 7, 8  # the exponent of the `q` of 1.0


def encode_signed(y: Float32[Array, "*s"], draw=None) -> UInt8[Array, "*s"]:
    """The codes of values in [-1, 1]; `draw` in [0, 1) rounds stochastically."""
    q = _rounded(jnp.abs(y), _SIGNED, draw)
    below = _ZERO - jnp.minimum(q, _ZERO)  # there is no -1.0
    return jnp.where(y < 0, below, _ZERO + q).astype(jnp.uint8)


def decode_signed(codes: UInt8[Array, "*s"]) -> Float32[Array, "*s"]:
    """The values of codes."""
    q = codes.astype(jnp.int32) - _ZERO
    size = _value(jnp.abs(q), _SIGNED)
    return jnp.where(q < 0, -size, size)


def encode_unsigned(y: Float32[Array, "*s"], draw=None) -> UInt8[Array, "*s"]:
    """The codes of values in [0, 1]; `draw` in [0, 1) rounds stochastically."""
    return (_rounded(y, _UNSIGNED, draw) - 1).astype(jnp.uint8)


def decode_unsigned(codes: UInt8[Array, "*s"]) -> Float32[Array, "*s"]:
    """The values of codes."""
    return _value(codes.astype(jnp.int32) + 1, _UNSIGNED)


def _first(top: int) -> int:
    """The exponent of the lowest decade, of one cell or of two."""
    return top - 7


def _value(q, top: int):
    """The value of `q`, whose exponent says the decade."""
    exponent = _first(top) + sum(
        (q >= 2**e).astype(jnp.int32) for e in range(_first(top) + 1, top)
    )
    cell = (q - jnp.left_shift(1, exponent)).astype(jnp.float32)
    scale, width = _decade(exponent, top)
    inside = scale * (0.1 + width * (cell + 0.5))
    some = jnp.where(q < 2 ** _first(top), 0.0, inside)
    return jnp.where(q >= 2**top, 1.0, some)


def _rounded(size, top: int, draw):
    """The `q` of the value nearest to a size in [0, 1], or of one of both beside it."""
    lowest = [_lowest(e, top) for e in range(_first(top), top)]
    counted = sum((size >= x).astype(jnp.int32) for x in lowest)
    exponent = _first(top) + jnp.maximum(counted - 1, 0)
    scale, width = _decade(exponent, top)
    begin = jnp.left_shift(1, exponent)
    cell = jnp.floor((size / scale - 0.1) / width - 0.5).astype(jnp.int32)
    below = begin + jnp.clip(cell, 0, begin - 1)
    below = jnp.where(counted == 0, 2 ** _first(top) - 1, below)
    below = jnp.where(size >= 1, 2**top - 1, below)
    low, high = _value(below, top), _value(below + 1, top)
    threshold = 0.5 if draw is None else draw
    return jnp.where(size - low > threshold * (high - low), below + 1, below)


def _lowest(exponent: int, top: int) -> float:
    return 10.0 ** (exponent - top + 1) * (0.1 + 0.45 / 2**exponent)


def _decade(exponent, top: int):
    """What the decade is multiplied by, and the width of its cells before that."""
    scale = jnp.ones(exponent.shape, jnp.float32)
    width = jnp.full(exponent.shape, 0.9 / 2 ** (top - 1), jnp.float32)
    for e in range(_first(top), top - 1):
        scale = jnp.where(exponent == e, 10.0 ** (e - top + 1), scale)
        width = jnp.where(exponent == e, 0.9 / 2**e, width)
    return scale, width
