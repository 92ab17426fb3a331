"""Floating numbers of 8 and 4 bits, and rounding to them.

Rounded here and not by XLA: its conversion from float32 rounds twice on a CPU, by way
of float16, and a conversion that is undone later it leaves out, with the rounding.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, UInt8

DTYPE = jnp.dtype(jnp.float8_e4m3fn)


@dataclass(frozen=True)
class SmallFloat:
    """Which numbers there are.

    Attributes:
      mantissa: bits of it.
      bits: of a number, its sign among them.
      subnormal: the smallest normal number; below it numbers are equally spaced.
      largest: the largest finite number.
      dtype: whose codes these are; None where arrays hold them as integers.
    """

    mantissa: int
    bits: int
    subnormal: float
    largest: float
    dtype: Any = None

    @property
    def steps(self) -> int:
        """Numbers from one power of two to the next."""
        return 2**self.mantissa

    @property
    def least(self) -> float:
        """The smallest number above zero."""
        return self.subnormal / self.steps


E4M3 = SmallFloat(3, 8, 2.0**-6, 448.0, DTYPE)
E5M2 = SmallFloat(2, 8, 2.0**-14, 57344.0, jnp.dtype(jnp.float8_e5m2))
E2M1 = SmallFloat(1, 4, 1.0, 6.0)

LARGEST, SUBNORMAL, LEAST = E4M3.largest, E4M3.subnormal, E4M3.least


def spacing(
    size: Float32[Array, "*s"], kind: SmallFloat = E4M3
) -> Float32[Array, "*s"]:
    """From the number at or below a size to the next one, a power of two."""
    bits = lax.bitcast_convert_type(size, jnp.uint32) & jnp.uint32(0x7F800000)
    power = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.maximum(power, kind.subnormal) * (1 / kind.steps)


def rounded(
    size: Float32[Array, "*s"], draw=None, kind: SmallFloat = E4M3
) -> Float32[Array, "*s"]:
    """Sizes up to the largest number as numbers of the kind, still in float32.

    To the nearest, ties to even; with `draw` in [0, 1) up or down, with the right mean.
    """
    step = spacing(size, kind)
    if draw is None:
        return jnp.round(size / step) * step
    below = jnp.floor(size / step) * step
    return below + jnp.where(size - below > draw * step, step, 0.0)


def codes(
    x: Float32[Array, "*s"], draw=None, kind: SmallFloat = E4M3
) -> UInt8[Array, "*s"]:
    """The bits of the numbers next to those of `x`, clipped to the largest."""
    size = rounded(jnp.minimum(jnp.abs(x), kind.largest), draw, kind)
    shift = 23 - kind.mantissa
    bits = lax.bitcast_convert_type(size, jnp.uint32) >> jnp.uint32(shift)
    # exponents of float32 begin below those of the kind, whose smallest is 1
    first = lax.bitcast_convert_type(jnp.float32(kind.subnormal), jnp.uint32)
    normal = bits - (first >> jnp.uint32(shift)) + jnp.uint32(kind.steps)
    small = (size * (1 / kind.least)).astype(jnp.uint32)
    code = jnp.where(size >= kind.subnormal, normal, small)
    sign = (x < 0).astype(jnp.uint32) << jnp.uint32(kind.bits - 1)
    return (code | sign).astype(jnp.uint8)


def encoded(
    x: Float32[Array, "*s"], draw=None, kind: SmallFloat = E4M3
) -> Float[Array, "*s"]:
    """Those numbers, in the dtype of the kind."""
    return lax.bitcast_convert_type(codes(x, draw, kind), kind.dtype)
