"""Moments as codes: blocks along the last axis, each with a scale of its own.

Blocks along the last axis, rather than of the flattened array, leave every other axis
as it is: codes and scales are sharded as the parameter, and a layer of a stack has its
own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Num

from jaxmem.optim.low_bit import companding, dynamic_map, float8, four_bit

_SMALLEST = 2.0**-100  # of a scale: a block of zeros divides by it


class MomentCodes(NamedTuple):
    """A moment in codes.

    Attributes:
      codes: int8, uint8 or float8_e4m3fn, of the parameter's shape; with 4 bits half
        its last axis.
      scale: what the largest code of each block stands for, [..., n / block]; bfloat16
        with companding (of the second moment's root), else float32.
    """

    codes: Num[Array, "..."]
    scale: Float[Array, "..."]


@dataclass(frozen=True)
class Format:
    """How one moment is stored; see `MomentCodes`.

    Attributes:
      encode: codes of normalised values and of numbers in [0, 1), or None, to round by.
      decode: the values of codes.
      dtype: of the codes.
      scale: dtype of the scales.
      root: whether values are those of the moment's root.
      packed: whether two codes share a byte.
      cheap: whether XLA for GPU computes values of it again for each use; what has many
        comparisons it keeps, in float32.
    """

    encode: Callable[..., Any]
    decode: Callable[..., Any]
    dtype: Any
    scale: Any = jnp.float32
    root: bool = False
    packed: bool = False
    cheap: bool = False


# (bits, code) -> the formats of the first and of the second moment, and their block
FORMATS: dict[tuple[int, str], tuple[Format, Format, int]] = {
    (8, "companding"): (
        Format(
            companding.encode_signed,
            companding.decode_signed,
            jnp.int8,
            jnp.bfloat16,
            cheap=True,
        ),
        Format(
            companding.encode_square,
            companding.decode_square,
            jnp.uint8,
            jnp.bfloat16,
            root=True,
            cheap=True,
        ),
        32,
    ),
    (8, "float8"): (
        Format(float8.encode_signed, float8.decode, float8.DTYPE, cheap=True),
        Format(float8.encode_root, float8.decode, float8.DTYPE, root=True, cheap=True),
        128,
    ),
    (8, "dynamic"): (
        Format(dynamic_map.encode_signed, dynamic_map.decode_signed, jnp.uint8),
        Format(dynamic_map.encode_unsigned, dynamic_map.decode_unsigned, jnp.uint8),
        256,
    ),
    (4, "dynamic"): (
        Format(four_bit.encode_signed, four_bit.decode_signed, jnp.uint8, packed=True),
        Format(
            four_bit.encode_unsigned, four_bit.decode_unsigned, jnp.uint8, packed=True
        ),
        128,
    ),
}


def shapes(fmt: Format, block: int, shape: tuple[int, ...]) -> MomentCodes:
    """The shapes and dtypes of a moment in codes."""
    *lead, n = shape
    stored = n // 2 if fmt.packed else n
    codes: Any = jax.ShapeDtypeStruct((*lead, stored), fmt.dtype)
    scale: Any = jax.ShapeDtypeStruct((*lead, n // block), fmt.scale)
    return MomentCodes(codes, scale)


def pack(
    fmt: Format, block: int, x: Float32[Array, "*b n"], draw: Any = None
) -> MomentCodes:
    """The codes of a moment.

    Args:
      fmt: the format.
      block: divides n.
      x: the moment.
      draw: numbers in [0, 1), of the shape of `x`, to round stochastically; None rounds
        to the nearest.
    """
    y = _blocks(jnp.sqrt(x) if fmt.root else x, block)
    scale = jnp.maximum(jnp.max(jnp.abs(y), axis=-1), _SMALLEST)
    if fmt.scale == jnp.bfloat16:
        # Upward, so that no element is clipped. Without `reduce_precision` XLA leaves
        # out the rounding where it keeps the wide value, and code and scale disagree.
        scale = lax.reduce_precision(scale * (1 + 2.0**-8), 8, 7)
    y = y / scale[..., None]
    codes = fmt.encode(y, None if draw is None else _blocks(draw, block))
    codes = four_bit.pack(codes) if fmt.packed else codes
    flat = codes.reshape(*x.shape[:-1], -1)
    return MomentCodes(flat.astype(fmt.dtype), scale.astype(fmt.scale))


def unpack(fmt: Format, moment: MomentCodes) -> Float32[Array, "..."]:
    """The moment that codes stand for."""
    blocks = moment.scale.shape[-1]
    codes = _blocks(moment.codes, moment.codes.shape[-1] // blocks)
    codes = four_bit.unpack(codes) if fmt.packed else codes
    y = fmt.decode(codes) * moment.scale.astype(jnp.float32)[..., None]
    return (jnp.square(y) if fmt.root else y).reshape(*moment.scale.shape[:-1], -1)


def _blocks(x, block: int):
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
