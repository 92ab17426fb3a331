"""Moments in the OCP's MX formats and in NVFP4: floating numbers of 8 or 4 bits.

"mxfp8" has elements of `float8_e4m3fn` for first moments and `float8_e5m2` for second
ones, "mxfp4" and "nvfp4" have e2m1, whose sizes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6. The
scale of an MX block, of 32, is a power of two; that of an NVFP4 block, of 16, a number
of float8_e4m3fn times a float32 number of the matrix.

Three things are there for second moments, which grow by 1 - b2 of a square a step,
less than half the distance of neighbouring numbers. They are rounded stochastically,
since to the nearest they would stop growing long before they are the mean square, which
makes steps longer; the exponent of an MX block is the next one where the OCP's rule
would clip the largest value; and no element becomes 0, which would divide a step by
`eps`, but the smallest number, which makes its step shorter. They are stored as they
are and not as roots: e5m2 has as many numbers for v as e4m3 has for its root.

Error of one rounding to the nearest, of the block's largest value; stochastic rounding
doubles it, where nothing is clipped, and has no bias above the smallest number:

- mxfp8: 1/16 of the element, and up to 1/8 of a first moment that is clipped; down to
  2^-14 of the largest; of a second moment 1/8 of the element, down to 2^-29 and more.
- mxfp4: a quarter of a first moment's largest, where it is clipped, 1/5 elsewhere; of a
  second moment 1/4. The smallest number of a second moment is 1/6 to 1/12 of it.
- nvfp4: 17/96, which is half of the gap from 4 to 6 of a scale that is off by 1/16. A
  block whose largest value is below 2^-6/448 of the matrix's has a coarser scale.

Source: OCP Microscaling Formats (MX) Specification v1.0, 2023; NVIDIA, "Pretraining
Large Language Models with NVFP4", arXiv 2509.25149, for NVFP4; "Recipes for
Pre-training LLMs with MXFP8", arXiv 2506.08027, for exponents rounded up.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxmem._float8 import E2M1, Kind, codes, encoded


def encoder(kind: Kind, positive: bool = False) -> Callable:
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
