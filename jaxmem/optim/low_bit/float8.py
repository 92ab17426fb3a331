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

Source: FP8-LM, arXiv 2310.18313, for first moments in this format; COAT,
arXiv 2410.19313, for both moments in blocks of 128.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jaxmem._float8 import DTYPE as DTYPE
from jaxmem._float8 import LARGEST, LEAST, encoded, spacing


def encode_signed(y: Float32[Array, "*s"], draw=None) -> Float[Array, "*s"]:
    """The codes of values in [-1, 1]; `draw` in [0, 1) rounds stochastically."""
    return encoded(y * LARGEST, draw)


def encode_root(y: Float32[Array, "*s"], draw=None) -> Float[Array, "*s"]:
    """The codes of roots in [0, 1]; rounded stochastically their squares are unbiased,
    except below the smallest."""
    size = jnp.clip(y * LARGEST, LEAST, LARGEST)
    if draw is None:
        return encoded(size)
    step = spacing(size)
    below = jnp.floor(size / step) * step
    gap = step * (2 * below + step)  # of the squares of two codes
    up = (size - below) * (size + below) > draw * gap
    return encoded(below + jnp.where(up, step, 0.0))


def decode(codes: Float[Array, "*s"]) -> Float32[Array, "*s"]:
    """The values in [-1, 1] of codes."""
    return codes.astype(jnp.float32) * (1 / LARGEST)
