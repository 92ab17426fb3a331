"""Moments in the OCP's MX formats and in NVFP4: floating numbers of 8 or 4 bits.

"mxfp8" has elements of `float8_e4m3fn` for first moments and `float8_e5m2` for second
ones, "mxfp4" and "nvfp4" have e2m1, whose sizes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6. The
scale of an MX block, of 32, is a power of two; that of an NVFP4 block, of 16, a number
of float8_e4m3fn times a float32 number of the matrix.

A second moment grows by 1 - b2 of a square a step, less than half of what neighbouring
numbers are apart. To the nearest an MX block would stop growing long before it holds
the mean square, since its scale has no digits that could grow, and steps would be
longer: second moments in MX blocks are rounded stochastically, and have the next
exponent where the OCP's rule would clip the largest. So are first moments in "mxfp4":
a b1 of 0.9 takes a tenth from them, and neighbours are more than two tenths apart, so
that to the nearest they would never fall. NVFP4's second scale follows the
largest value exactly, so that to the nearest, which is closer, second moments grow;
their roots may be off by a third, mostly too large. No second moment becomes 0, which
would divide a step by `eps`, but the smallest number, which makes its step shorter. It
is stored as it is and not as its root: e5m2 has as many numbers for v as e4m3 has for
its root, and with e2m1 updates are closer to Adam's where magnitudes are alike.

Error of one rounding to the nearest, of the block's largest value; stochastic rounding
doubles it, where nothing is clipped, and has no bias above the smallest number:

- mxfp8: of a first moment 1/8, where it is clipped, and else 1/17 of the element down
  to 2^-14 of the largest; of a second moment 1/9 of the element, down to 2^-28.
- mxfp4: 1/5; the smallest number of a second moment is 1/12 to 1/6 of the largest.
- nvfp4: 3/17, half of the gap from 4 to 6 with a scale that is off by 1/17; the
  smallest number of a second moment is 1/12 of the largest. A block whose largest value
  is below 2^-6/448 of the matrix's has a coarser scale.

Source: OCP Microscaling Formats (MX) Specification v1.0, 2023; NVIDIA, "Pretraining
Large Language Models with NVFP4", arXiv 2509.25149, for NVFP4; "Recipes for
Pre-training LLMs with MXFP8", arXiv 2506.08027, for exponents rounded up.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxmem._float8 import E2M1, SmallFloat, codes, encoded


def encoder(kind: SmallFloat, positive: bool = False) -> Callable:
    """`(y, draw)`: the codes of values; `draw` in [0, 1) rounds stochastically.

    Args:
      kind: of the elements.
      positive: whether no code is that of 0.
    """

    def encode(y, draw=None):
        y = jnp.maximum(y, kind.least) if positive else y
        if kind.dtype is not None:
            return encoded(y, draw, kind)
        return codes(y, draw, kind).astype(jnp.int32)  # which `four_bit.pack` takes

    return encode


def decode(codes: Float[Array, "*s"]) -> Float32[Array, "*s"]:
    """The values of codes of 8 bits."""
    return codes.astype(jnp.float32)


def decode_e2m1(codes: Int32[Array, "*s"]) -> Float32[Array, "*s"]:
    """The values of codes of 4 bits, by arithmetic: few devices have the type."""
    code = codes.astype(jnp.uint32)
    size = code & jnp.uint32(7)
    bits = (size << jnp.uint32(22)) + jnp.uint32(126 << 23)
    normal = lax.bitcast_convert_type(bits, jnp.float32)
    value = jnp.where(size < 2, size.astype(jnp.float32) * E2M1.least, normal)
    return jnp.where(code > 7, -value, value)
