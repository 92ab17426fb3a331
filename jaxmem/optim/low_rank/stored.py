"""How a projector is stored: in float32, bfloat16, float16, or as 8- or 4-bit codes.

The codes are affine, in groups along the last axis (Q-GaLore, arXiv 2407.08296, has 4
bits and groups of 256): x = scale (code - zero), where the group's values, and zero,
lie between the smallest code and the largest. An element is off by at most one step,
the range of its group over 255 or 15.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, UInt8, UInt32

from jaxmem.optim.low_bit.bfloat16 import nearest, stochastic
from jaxmem.optim.low_bit.random import uniform

ProjectorDType = Literal["float32", "bfloat16", "int8", "int4", "gradient"]
# what a projector is stored as once the dtype of its gradient is known
StoredAs = Literal["float32", "bfloat16", "float16", "int8", "int4"]
GROUP = 256
_LEAST_SCALE = 1e-12  # of a group of zeros


class ProjectorCodes(NamedTuple):
    """A matrix in codes.

    Attributes:
      codes: uint8[..., groups, group], or half as many bytes where two share one.
      scale: float32[..., groups, 1], the step between two codes.
      zero: uint8[..., groups, 1], the code of zero.
    """

    codes: UInt8[Array, "*matrix groups bytes"]
    scale: Float32[Array, "*matrix groups 1"]
    zero: UInt8[Array, "*matrix groups 1"]


def stored_as(kind: ProjectorDType, dtype: Any) -> StoredAs:
    """How the projector of a gradient of this dtype is stored."""
    if kind != "gradient":
        return kind
    # projectors are computed in float32: a wider one would hold nothing more
    name = jnp.dtype(dtype).name
    return name if name in ("bfloat16", "float16") else "float32"


def empty(
    shape: tuple[int, ...],
    kind: StoredAs,
    zeros: Callable[[tuple[int, ...], Any], jax.Array],
) -> Any:
    """A stored matrix of zeros.

    Args:
      shape: of the matrix.
      kind: how to store it.
      zeros: makes an array of a shape and dtype; the shape is that of the matrix, or of
        (..., groups, any) for codes.
    """
    if kind in ("float32", "bfloat16", "float16"):
        return zeros(shape, kind)
    group = _group(shape[-1])
    rows = (*shape[:-1], shape[-1] // group)
    return ProjectorCodes(
        zeros((*rows, group // (2 if kind == "int4" else 1)), "uint8"),
        zeros((*rows, 1), "float32"),
        zeros((*rows, 1), "uint8"),
    )


def store(
    x: Float32[Array, "*matrix n"],
    kind: StoredAs,
    bits: UInt32[Array, "*matrix n"] | None = None,
) -> Any:
    """The matrix as it is kept.

    Args:
      x: the matrix.
      kind: how to store it.
      bits: random, to round stochastically; None rounds to the nearest.
    """
    if kind == "float32":
        return x
    if kind == "bfloat16":
        # a cast alone is dropped by XLA where it is undone in the same program
        return (nearest(x) if bits is None else stochastic(x, bits)).astype(kind)
    if kind == "float16":
        return lax.reduce_precision(x, 5, 10).astype(kind)
    group = _group(x.shape[-1])
    grouped = (*x.shape[:-1], x.shape[-1] // group, group)
    x = x.reshape(grouped)
    most = 255 if kind == "int8" else 15
    low = jnp.minimum(jnp.min(x, axis=-1, keepdims=True), 0.0)
    high = jnp.maximum(jnp.max(x, axis=-1, keepdims=True), 0.0)
    scale = jnp.maximum(high - low, most * _LEAST_SCALE) / most
    zero = jnp.round(-low / scale)
    steps = x / scale
    if bits is None:
        steps = jnp.round(steps)
    else:
        steps = jnp.floor(steps + uniform(bits).reshape(grouped))
    codes = jnp.clip(steps + zero, 0, most).astype(jnp.uint8)
    if kind == "int4":
        codes = codes[..., : group // 2] | (codes[..., group // 2 :] << 4)
    return ProjectorCodes(codes, scale, zero.astype(jnp.uint8))


def load(stored: Any, columns: int) -> Float32[Array, "*matrix n"]:
    """The matrix of a stored one, whose last axis has this many columns."""
    if not isinstance(stored, ProjectorCodes):
        return stored.astype(jnp.float32)
    codes, scale, zero = stored
    groups, size = codes.shape[-2:]
    if groups * size < columns:  # two to a byte
        codes = jnp.concatenate([codes & 15, codes >> 4], axis=-1)
    difference = codes.astype(jnp.float32) - zero.astype(jnp.float32)
    return (difference * scale).reshape(*codes.shape[:-2], columns)


def why_not(columns: int, kind: ProjectorDType) -> str:
    """What prevents vectors of this length from being stored so; or ""."""
    odd = kind == "int4" and columns % 2
    return "two codes of 4 bits share a byte, and the axis is odd" if odd else ""


def _group(columns: int) -> int:
    return GROUP if columns % GROUP == 0 else columns
