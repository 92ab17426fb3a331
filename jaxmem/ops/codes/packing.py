"""Codes of 1 to 8 bits an element, packed to the bit."""

import math

import jax.numpy as jnp
from jaxtyping import Array, UInt8

from jaxmem._bits import pack_bits, packed_nbytes, unpack_bits

MOST_BITS = 8  # of a code


def packed_codes_nbytes(shape: tuple[int, ...], bits: int) -> int:
    """Bytes that `pack_codes` makes of codes of this shape."""
    return math.prod(shape) if bits == 8 else bits * packed_nbytes(shape)


def pack_codes(codes: UInt8[Array, "*shape"], bits: int) -> UInt8[Array, "..."]:
    """Codes below 2**bits in bits/8 byte an element; `unpack_codes` undoes it."""
    if bits == 8:
        return codes
    # Bit planes, packed as a mask is (`_bits.py`): no code straddles two bytes, and the
    # axis of the planes stays whole when the array is sharded. Fields of 2 or 4 bits in
    # a byte need two arrays joined by a copy for 3 bits, and more copies on TPU.
    planes = [(codes >> jnp.uint8(b)) & jnp.uint8(1) for b in range(bits)]
    return jnp.stack([pack_bits(plane != 0) for plane in planes])


def unpack_codes(
    packed: UInt8[Array, "..."], bits: int, shape: tuple[int, ...]
) -> UInt8[Array, "*codes"]:
    """The codes of shape `shape` that `pack_codes` packed."""
    if bits == 8:
        return packed
    planes = [unpack_bits(packed[b], shape) for b in range(bits)]
    codes = planes[0].astype(jnp.uint8)
    for b, plane in enumerate(planes[1:], 1):
        codes |= plane.astype(jnp.uint8) << jnp.uint8(b)
    return codes
