"""Booleans stored eight to a byte.

Eight neighbours along one axis share a byte. It is the second to last axis if that
wastes little: the last axis then stays whole, so that TPU's 128 lanes stay full (XLA
would pad a trailing axis of 8 sixteenfold), and neighbours stay on one device if the
axis is sharded. The last axis is used only if no other fits, cut into eight blocks. The
code is plain XLA integer code, limited by the memory that it reads.
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, UInt8


def _packed_shape(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], -(-shape[axis] // 8), *shape[axis + 1 :])


def _axis(shape: tuple[int, ...]) -> int:
    """The axis to pack: second to last, unless padding it costs more than a quarter."""
    order = [*range(len(shape) - 2, -1, -1), len(shape) - 1]
    size = {a: math.prod(_packed_shape(shape, a)) for a in order}
    least = min(size.values())
    return next(a for a in order if 4 * size[a] <= 5 * least)


def _grouped(shape: tuple[int, ...], axis: int) -> tuple[tuple[int, ...], int]:
    """The shape with the eight bits as an axis of their own, and that axis."""
    bits = axis if axis == len(shape) - 1 else axis + 1
    whole = _packed_shape(shape, axis)
    return (*whole[:bits], 8, *whole[bits:]), bits


def packed_nbytes(shape: tuple[int, ...]) -> int:
    """Bytes that `pack_bits` makes of a mask of this shape."""
    shape = shape or (1,)
    return math.prod(_packed_shape(shape, _axis(shape)))


def pack_bits(mask: Bool[Array, "*shape"]) -> UInt8[Array, "..."]:
    """A mask of any shape in about an eighth of its bytes; `unpack_bits` undoes it."""
    shape = mask.shape or (1,)
    axis = _axis(shape)
    grouped, bits = _grouped(shape, axis)
    padding = [(0, 0)] * len(shape)
    padding[axis] = (0, -shape[axis] % 8)
    # in 32-bit lanes, since XLA for TPU makes another copy for sums of bytes
    values = jnp.pad(mask.reshape(shape).astype(jnp.int32), padding).reshape(grouped)
    place = lax.broadcasted_iota(jnp.int32, grouped, bits)
    return jnp.sum(values << place, axis=bits, dtype=jnp.int32).astype(jnp.uint8)


def unpack_bits(
    packed: UInt8[Array, "..."], shape: tuple[int, ...]
) -> Bool[Array, "..."]:
    """The mask of shape `shape` that `pack_bits` packed."""
    full = shape or (1,)
    axis = _axis(full)
    grouped, bits = _grouped(full, axis)
    place = lax.broadcasted_iota(jnp.int32, grouped, bits)
    spread = jnp.broadcast_to(jnp.expand_dims(packed.astype(jnp.int32), bits), grouped)
    padded = (*full[:axis], 8 * _packed_shape(full, axis)[axis], *full[axis + 1 :])
    mask = (((spread >> place) & 1) != 0).reshape(padded)
    return lax.slice_in_dim(mask, 0, full[axis], axis=axis).reshape(shape)
