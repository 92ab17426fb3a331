"""What a block's values are divided by, and how it is stored.

`chosen` is a number that the stored form has exactly: code and scale agree, whatever
XLA makes of the conversions between them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, UInt8

from jaxmem import _float8
from jaxmem._float8 import SmallFloat

SMALLEST = 2.0**-100  # of a scale: a block of zeros divides by it
_NAN = 255  # of exponents


def _cast(dtype: Any) -> Callable[..., Any]:
    return lambda x: x.astype(dtype)


@dataclass(frozen=True)
class BlockScale:
    """How the scale of a block is found and stored.

    Attributes:
      dtype: of what is stored.
      chosen: the scale of a block, float32, by its largest value.
      stored: that scale in the dtype.
      wide: a stored scale in float32.
    """

    dtype: Any
    chosen: Callable[..., Any]
    stored: Callable[..., Any]
    wide: Callable[..., Any] = _cast(jnp.float32)


def largest_of(y: Float32[Array, "*b n"]) -> Float32[Array, "*b"]:
    """The largest size of each block, NaN where one is NaN: as integers, which are in
    the order of the sizes. XLA for CPU leaves NaN out of a maximum of floats."""
    bits = lax.bitcast_convert_type(jnp.abs(y), jnp.int32)
    return lax.bitcast_convert_type(jnp.max(bits, axis=-1), jnp.float32)


def _largest(largest: Float32[Array, "*s"]) -> Float32[Array, "*s"]:
    return jnp.where(largest < SMALLEST, SMALLEST, largest)


def _upward(largest: Float32[Array, "*s"]) -> Float32[Array, "*s"]:
    """Upward, so that no element is clipped. Without `reduce_precision` XLA leaves out
    the rounding where it keeps the wide value, and code and scale disagree."""
    return lax.reduce_precision(_largest(largest) * (1 + 2.0**-8), 8, 7)


FLOAT32 = BlockScale(jnp.float32, _largest, _cast(jnp.float32))
BFLOAT16 = BlockScale(jnp.bfloat16, _upward, _cast(jnp.bfloat16))


def shared_exponent(kind: SmallFloat, *, clips: bool = True) -> BlockScale:
    """A power of two as its exponent plus 127, uint8: E8M0 of the OCP's MX formats.

    Args:
      kind: of the elements.
      clips: the OCP's rule, by which a block's largest value has the exponent of the
        largest element, and is clipped where its mantissa is larger. False: such a
        block has the next power, and nothing is clipped. What grows by less than that
        mantissa has room for, clipped would never grow.
    """
    top = math.frexp(kind.largest)[1] - 1

    def chosen(largest):
        bits = lax.bitcast_convert_type(largest, jnp.uint32) >> jnp.uint32(23)
        # from 1, the exponent of float32's smallest normal number
        exponent = jnp.maximum(bits.astype(jnp.int32) - top, 1)
        scale = _power(exponent)
        if not clips:
            scale = jnp.where(largest > kind.largest * scale, 2 * scale, scale)
        return jnp.where(jnp.isfinite(largest), scale, jnp.nan)

    return BlockScale(jnp.uint8, chosen, _exponent, _power)


def _exponent(scale: Float32[Array, "*s"]) -> UInt8[Array, "*s"]:
    bits = lax.bitcast_convert_type(scale, jnp.uint32) >> jnp.uint32(23)
    return (bits & jnp.uint32(_NAN)).astype(jnp.uint8)


def _power(exponent) -> Float32[Array, "*s"]:
    """2 to the exponent less 127; 0 for that of a new state, 0."""
    bits = exponent.astype(jnp.uint32) << jnp.uint32(23)
    return jnp.where(
        exponent == _NAN, jnp.nan, lax.bitcast_convert_type(bits, jnp.float32)
    )


def _fraction(largest: Float32[Array, "*s"]) -> Float32[Array, "*s"]:
    """Of numbers of float8_e4m3fn, the one nearest to a 6th, and never 0."""
    near = _float8.rounded(
        jnp.clip(largest / _float8.E2M1.largest, _float8.LEAST, _float8.LARGEST)
    )
    return jnp.where(jnp.isfinite(largest), near, jnp.nan)


def _fraction_stored(scale):
    nan = lax.bitcast_convert_type(jnp.uint8(0x7F), _float8.DTYPE)
    return jnp.where(jnp.isnan(scale), nan, _float8.encoded(scale))


# of a block whose values are divided by the scale of their tensor
FLOAT8 = BlockScale(_float8.DTYPE, _fraction, _fraction_stored)


def of_tensor(largest: Float32[Array, "*b rows blocks"]) -> Float32[Array, "*b"]:
    """NVFP4's second scale: the largest value becomes 6 * 448, the largest product.

    Args:
      largest: of each block; those that are not finite are left out, so that they alone
        become NaN. A single row has no axis of rows.
    """
    finite = jnp.where(jnp.isfinite(largest), largest, 0.0)
    top = jnp.max(finite, axis=(-2, -1)[-min(largest.ndim, 2) :])
    return jnp.maximum(top * (1 / (_float8.E2M1.largest * _float8.LARGEST)), SMALLEST)
