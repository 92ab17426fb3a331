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
from jaxtyping import Array, Float32, Num

from jaxmem._float8 import E2M1, E4M3, E5M2, SmallFloat
from jaxmem.optim.low_bit import (
    companding,
    dynamic_map,
    float8,
    four_bit,
    microscaling,
    scales,
)


class MomentCodes(NamedTuple):
    """A moment in codes.

    Attributes:
      codes: int8, uint8, float8_e4m3fn or float8_e5m2, of the parameter's shape; with
        4 bits half its last axis.
      scale: of each block, [..., n / block]: what its largest code stands for, bfloat16
        with companding (of the second moment's root), float32 with "float8" and
        "dynamic"; what 1 stands for with the others: uint8 with "mxfp8" and "mxfp4", an
        exponent of two plus 127 (E8M0), float8_e4m3fn with "nvfp4".
      tensor: of each matrix, the last two axes, float32: what 1 of its scales stands
        for, with "nvfp4"; None with others.
    """

    codes: Num[Array, "..."]
    scale: Num[Array, "..."]
    tensor: Float32[Array, "..."] | None = None


@dataclass(frozen=True)
class Format:
    """How one moment is stored; see `MomentCodes`.

    Attributes:
      encode: codes of normalised values and of numbers in [0, 1), or None, to round by.
      decode: the values of codes.
      dtype: of the codes.
      scale: how the scale of a block is found and stored.
      tensor: whether each matrix has a scale, too, found before the blocks': an update
        then is no longer one of each row alone.
      stochastic: whether it is rounded stochastically where the options do not say.
      root: whether values are those of the moment's root.
      packed: whether two codes share a byte.
      cheap: whether XLA for GPU computes values of it again for each use; what has many
        comparisons it keeps, in float32.
    """

    encode: Callable[..., Any]
    decode: Callable[..., Any]
    dtype: Any
    scale: scales.BlockScale = scales.FLOAT32
    tensor: bool = False
    stochastic: bool = False
    root: bool = False
    packed: bool = False
    cheap: bool = False


def _microscaled(
    kind: SmallFloat,
    scale: scales.BlockScale,
    tensor: bool = False,
    second: bool = False,
) -> Format:
    four = kind is E2M1
    return Format(
        microscaling.encoder(kind, positive=second),
        microscaling.decode_e2m1 if four else microscaling.decode,
        jnp.uint8 if four else kind.dtype,
        scale,
        tensor=tensor,
        # a step changes either by less than half of what numbers are apart
        stochastic=not tensor and (second or four),
        packed=four,
        cheap=not four,
    )


# (bits, code) -> the formats of the first and of the second moment, and their block
FORMATS: dict[tuple[int, str], tuple[Format, Format, int]] = {
    (8, "companding"): (
        Format(
            companding.encode_signed,
            companding.decode_signed,
            jnp.int8,
            scales.BFLOAT16,
            cheap=True,
        ),
        Format(
            companding.encode_square,
            companding.decode_square,
            jnp.uint8,
            scales.BFLOAT16,
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
    (8, "mxfp8"): (
        _microscaled(E4M3, scales.shared_exponent(E4M3)),
        _microscaled(E5M2, scales.shared_exponent(E5M2, clips=False), second=True),
        32,
    ),
    (4, "mxfp4"): (
        _microscaled(E2M1, scales.shared_exponent(E2M1, clips=False)),
        _microscaled(E2M1, scales.shared_exponent(E2M1, clips=False), second=True),
        32,
    ),
    (4, "nvfp4"): (
        _microscaled(E2M1, scales.FLOAT8, tensor=True),
        _microscaled(E2M1, scales.FLOAT8, tensor=True, second=True),
        16,
    ),
}


def shapes(fmt: Format, block: int, shape: tuple[int, ...]) -> MomentCodes:
    """The shapes and dtypes of a moment in codes."""
    *lead, n = shape
    stored = n // 2 if fmt.packed else n
    codes: Any = jax.ShapeDtypeStruct((*lead, stored), fmt.dtype)
    scale: Any = jax.ShapeDtypeStruct((*lead, n // block), fmt.scale.dtype)
    tensor: Any = jax.ShapeDtypeStruct(shape[:-2], jnp.float32) if fmt.tensor else None
    return MomentCodes(codes, scale, tensor)


def types_of(codes: Any) -> list[tuple[tuple[int, ...], str]]:
    """(shape, dtype) of each array of codes, or of numbers."""
    return [(x.shape, str(x.dtype)) for x in jax.tree.leaves(codes)]


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
    largest = scales.largest_of(y)
    tensor = scales.of_tensor(largest) if fmt.tensor else None
    scale = fmt.scale.chosen(_over(largest, tensor))
    y = _over(y, tensor) / scale[..., None]
    codes = fmt.encode(y, None if draw is None else _blocks(draw, block))
    codes = four_bit.pack(codes) if fmt.packed else codes
    flat = codes.reshape(*x.shape[:-1], -1)
    return MomentCodes(flat.astype(fmt.dtype), fmt.scale.stored(scale), tensor)


def unpack(fmt: Format, moment: MomentCodes) -> Float32[Array, "..."]:
    """The moment that codes stand for."""
    blocks = moment.scale.shape[-1]
    codes = _blocks(moment.codes, moment.codes.shape[-1] // blocks)
    codes = four_bit.unpack(codes) if fmt.packed else codes
    scale = fmt.scale.wide(moment.scale)
    if moment.tensor is not None:
        scale = scale * _beside(scale, moment.tensor)
    y = fmt.decode(codes) * scale[..., None]
    return (jnp.square(y) if fmt.root else y).reshape(*moment.scale.shape[:-1], -1)


def _over(x, tensor):
    return x if tensor is None else x / _beside(x, tensor)


def _beside(x, tensor):
    """One scale a matrix, with axes of one for the others of `x`."""
    return tensor.reshape(*tensor.shape, *[1] * (x.ndim - tensor.ndim))


def _blocks(x, block: int):
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
