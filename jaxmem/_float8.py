"""Numbers of `float8_e4m3fn`, eight bits with four of exponent, and rounding to them.

Rounded here and not by XLA: its conversion from float32 rounds twice on a CPU, by way
of float16, and a conversion that is undone later it leaves out, with the rounding.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

DTYPE = jnp.dtype(jnp.float8_e4m3fn)
LARGEST = 448.0
SUBNORMAL = 2.0**-6  # below it numbers are equally spaced
_STEPS = 8  # numbers from one power of two to the next
LEAST = SUBNORMAL / _STEPS  # the smallest number above zero


def spacing(size: Float32[Array, "*s"]) -> Float32[Array, "*s"]:
    """From the number at or below a size to the next one, a power of two."""
    bits = lax.bitcast_convert_type(size, jnp.uint32) & jnp.uint32(0x7F800000)
    power = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.maximum(power, SUBNORMAL) * (1 / _STEPS)


def rounded(size: Float32[Array, "*s"], draw=None) -> Float32[Array, "*s"]:
    """Sizes from 0 to 448 as numbers of the format, still in float32.

    To the nearest, ties to even; with `draw` in [0, 1) up or down, with the right mean.
    """
    step = spacing(size)
    if draw is None:
        return jnp.round(size / step) * step
    below = jnp.floor(size / step) * step
    return below + jnp.where(size - below > draw * step, step, 0.0)


def encoded(x: Float32[Array, "*s"], draw=None) -> Float[Array, "*s"]:
    """The numbers of the format next to those of `x`, clipped to -448 ... 448."""
    size = rounded(jnp.minimum(jnp.abs(x), LARGEST), draw)
    bits = lax.bitcast_convert_type(size, jnp.uint32) >> jnp.uint32(20)
    # exponents of float32 begin 120 below those of the format
    normal = bits - jnp.uint32(120 * _STEPS)
    small = (size * (1 / LEAST)).astype(jnp.uint32)
    code = jnp.where(size >= SUBNORMAL, normal, small)
    sign = (x < 0).astype(jnp.uint32) << jnp.uint32(7)
    return lax.bitcast_convert_type((code | sign).astype(jnp.uint8), DTYPE)
