"""8-bit codes that are floating numbers, `float8_e4m3fn`: four bits of exponent.

A block's values are divided by its largest and multiplied by 448, the largest number of
the format. Its relative error is the same over five decades, where companding has
smaller errors near the largest value and larger ones below a hundredth of it. The
second moment is stored as its root: the root is what divides the step, and in five
decades of roots there is room for ten of the moment. Its smallest code is the smallest
number of the format rather than 0, which would divide a step by `eps`.

Error of one rounding: 2^-4 of the element itself down to 3.5e-5 of the block's largest
(2^-6 of 448, where the numbers become subnormal), and below that 2.2e-6 of the largest;
for the second moment the same of its root. Stochastic rounding doubles it and has no
bias.

Rounded here and not by XLA, whose conversion from float32 rounds twice on a CPU, by way
of float16. Source: FP8-LM, arXiv 2310.18313, for first moments in this format; COAT,
arXiv 2410.19313, section 4, for both moments in blocks of 128.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

DTYPE = jnp.float8_e4m3fn
LARGEST = 448.0
SUBNORMAL = 2.0**-6  # below it numbers are equally spaced
_STEPS = 8  # numbers from one power of two to the next
_LEAST = SUBNORMAL / _STEPS  # the smallest number above zero


def encode_signed(y: Float32[Array, "*s"], draw=None) -> Float[Array, "*s"]:
    """The codes of values in [-1, 1]; `draw` in [0, 1) rounds stochastically."""
    size = jnp.minimum(jnp.abs(y) * LARGEST, LARGEST)
    width = _width(size)
    if draw is None:
        code = jnp.round(size / width) * width
    else:
        below = jnp.floor(size / width) * width
        code = below + jnp.where(size - below > draw * width, width, 0.0)
    return (jnp.sign(y) * code).astype(DTYPE)


def encode_root(y: Float32[Array, "*s"], draw=None) -> Float[Array, "*s"]:
    """The codes of roots in [0, 1]; rounded stochastically their squares are unbiased,
    except below the smallest."""
    size = jnp.clip(y * LARGEST, _LEAST, LARGEST)
    width = _width(size)
    if draw is None:
        return (jnp.round(size / width) * width).astype(DTYPE)
    below = jnp.floor(size / width) * width
    gap = width * (2 * below + width)  # of the squares of two codes
    up = (size - below) * (size + below) > draw * gap
    return (below + jnp.where(up, width, 0.0)).astype(DTYPE)


def decode(codes: Float[Array, "*s"]) -> Float32[Array, "*s"]:
    """The values in [-1, 1] of codes."""
    return codes.astype(jnp.float32) * (1 / LARGEST)


def _width(size: Float32[Array, "*s"]) -> Float32[Array, "*s"]:
    """From the number below a size to the one above, a power of two."""
    bits = lax.bitcast_convert_type(size, jnp.uint32) & jnp.uint32(0x7F800000)
    power = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.maximum(power, SUBNORMAL) * (1 / _STEPS)
