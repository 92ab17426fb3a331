"""8-bit codes by arithmetic companding (FlashOptim, arXiv 2602.23349, section 3).

A group's values are divided by a scale, so that they lie in [-1, 1]. The first moment
is bent by `z = 2 y / (1 + |y|)` and rounded to int8, which spends codes on small
values; the second is the square of a uint8. There is no table, so it fuses with what
is around.

Two things differ from the paper, whose rules diverge where the magnitudes in a group
differ by much: there a small second moment is rounded to 0, and the step is divided by
`eps`. Here the smallest code of a second moment is 2, so that its root is never below
the group's largest over 128: with a smallest code of 1, rounding to the nearest leaves
too many elements there whose gradients have grown. And the scale is bfloat16, whose
range is that of float32, rather than float16; it is rounded up, so that no element is
clipped.

Error of one rounding, of the group's largest value: at most 1/127 for a first moment
(half a code where the bend is steepest), 1/508 near 0; 1/510 for the root of a second
moment above the smallest code. Stochastic rounding doubles it and has no bias.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int8, UInt8

SIGNED, ROOTS = 127, 255  # the largest codes
LEAST = 2  # of a second moment


def encode_signed(y: Float32[Array, "*s"], draw=None) -> Int8[Array, "*s"]:
    """The codes of values in [-1, 1]; `draw` in [0, 1) rounds stochastically."""
    z = 2 * SIGNED * y / (1 + jnp.abs(y))
    if draw is None:
        code = jnp.floor(z + 0.5)
    else:  # between the values of two codes, which the bend spaces unevenly
        below = jnp.clip(jnp.floor(z), -SIGNED, SIGNED - 1)
        low, high = _expanded(below), _expanded(below + 1)
        code = jnp.where(y - low > draw * (high - low), below + 1, below)
    return jnp.clip(code, -SIGNED, SIGNED).astype(jnp.int8)


def decode_signed(codes: Int8[Array, "*s"]) -> Float32[Array, "*s"]:
    """The values in [-1, 1] of codes."""
    return _expanded(codes.astype(jnp.float32))


def encode_square(y: Float32[Array, "*s"], draw=None) -> UInt8[Array, "*s"]:
    """The codes of roots in [0, 1]; rounded stochastically their squares are unbiased,
    except below the smallest."""
    root = ROOTS * y
    if draw is None:
        code = jnp.floor(root + 0.5)
    else:
        below = jnp.clip(jnp.floor(root), 0, ROOTS - 1)
        width = 2 * below + 1  # of the squares of two codes
        up = jnp.square(root) - jnp.square(below) > draw * width
        code = jnp.where(up, below + 1, below)
    return jnp.clip(code, LEAST, ROOTS).astype(jnp.uint8)


def decode_square(codes: UInt8[Array, "*s"]) -> Float32[Array, "*s"]:
    """The roots in [0, 1] of codes."""
    return codes.astype(jnp.float32) / ROOTS


def _expanded(code):
    z = code / SIGNED
    return z / (2 - jnp.abs(z))
