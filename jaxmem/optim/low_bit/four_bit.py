"""torchao's 4-bit maps: sixteen values, compared one by one.

The first moment has a dynamic map with signs, the second k/16 for k = 1 ... 16, without
0. Two codes share a byte: those of the first half of a block are the low bits, those of
the second half the high ones, so that a block stays together.

Error of one rounding, of the block's largest value: at most half the widest gap, 0.1125
for a first moment (a quarter or more of a small one), 1/32 for a second moment above
1/16; below, it becomes 1/16, which makes the step smaller.

Source: torchao, `subclass_4bit`; Li et al., arXiv 2309.01507, for the maps.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt8

_SIZES = (0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875)
SIGNED = (*(-x for x in reversed(_SIZES)), 0.0, *_SIZES, 1.0)
UNSIGNED = tuple(k / 16 for k in range(1, 17))


def encode_signed(y: Float32[Array, "*s"], draw=None) -> Int32[Array, "*s"]:
    """The codes of values in [-1, 1]; `draw` in [0, 1) rounds stochastically."""
    return _rounded(y, SIGNED, draw)


def decode_signed(codes: Int32[Array, "*s"]) -> Float32[Array, "*s"]:
    """The values of codes."""
    return _value(codes, SIGNED)


def encode_unsigned(y: Float32[Array, "*s"], draw=None) -> Int32[Array, "*s"]:
    """The codes of values in [0, 1]; `draw` in [0, 1) rounds stochastically."""
    return _rounded(y, UNSIGNED, draw)


def decode_unsigned(codes: Int32[Array, "*s"]) -> Float32[Array, "*s"]:
    """The values of codes."""
    return (codes.astype(jnp.float32) + 1) / 16


def pack(codes: Int32[Array, "*b n"]) -> UInt8[Array, "*b n/2"]:
    """Two codes of 0 ... 15 a byte, the halves of the last axis."""
    half = codes.shape[-1] // 2
    low, high = (
        lax.slice_in_dim(codes, i * half, (i + 1) * half, axis=-1) for i in (0, 1)
    )
    return (low | (high << 4)).astype(jnp.uint8)


def unpack(packed: UInt8[Array, "*b n/2"]) -> Int32[Array, "*b n"]:
    """The codes that `pack` packed."""
    half = packed.shape[-1]
    shape = (*packed.shape[:-1], 2, half)
    wide = jnp.broadcast_to(packed.astype(jnp.int32)[..., None, :], shape)
    shift = 4 * lax.broadcasted_iota(jnp.int32, shape, len(shape) - 2)
    # no concatenation: layers of a stack are to be unpacked one at a time
    return ((wide >> shift) & 15).reshape(*packed.shape[:-1], 2 * half)


def _value(codes, values: tuple[float, ...]):
    out = jnp.full(codes.shape, values[0], jnp.float32)
    for code, value in enumerate(values[1:], 1):
        out = jnp.where(codes == code, value, out)
    return out


def _rounded(y, values: tuple[float, ...], draw):
    if draw is None:
        middles = ((a + b) / 2 for a, b in zip(values, values[1:], strict=False))
        return sum((y > x).astype(jnp.int32) for x in middles)
    below = sum((y >= x).astype(jnp.int32) for x in values[1:-1])
    low, high = _value(below, values), _value(below + 1, values)
    return below + (y - low > draw * (high - low)).astype(jnp.int32)
