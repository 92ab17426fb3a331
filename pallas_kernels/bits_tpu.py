"""Booleans eight to a byte on TPU: rows 8r .. 8r + 7 share the bytes of row r.

That is the layout of XLA's twin, which packs along the second to last axis. A tile of
float32 or int32 has eight rows, so a byte is a sum over one tile's sublanes, and
columns stay in their lanes: no byte is padding.

Not optimal: a sum over sublanes costs three rotations where elements that share a byte
lay in eight tiles, which would take none; but then rows would have to come by 256.

Through memory go, for n elements of b bytes: pack reads n b and writes n/8; unpack
reads n/8 and writes n.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._activation import LANES
from pallas_kernels._outputs import like

_ROWS = 256  # 32 rows of bytes, a whole tile of them
_COLUMNS = 512
_DTYPES = ("bool", "int8", "uint8", "int32", "bfloat16", "float32")


def pack_rows(bit):
    """int32 of zeros and ones [8 r, c] -> their bytes as int32 [r, c]."""
    rows, columns = bit.shape
    place = lax.broadcasted_iota(jnp.int32, bit.shape, 0) & 7
    grouped = (bit << place).reshape(rows // 8, 8, columns)
    return jnp.sum(grouped, axis=1, dtype=jnp.int32)


def unpack_rows(byte):
    """Bytes as int32 [r, c] -> int32 of zeros and ones [8 r, c]."""
    rows, columns = byte.shape
    spread = jnp.broadcast_to(byte[:, None, :], (rows, 8, columns))
    spread = spread.reshape(8 * rows, columns)
    place = lax.broadcasted_iota(jnp.int32, spread.shape, 0) & 7
    return (spread >> place) & 1


def is_set(x):
    return x != 0


def pack(
    x: jax.Array,
    holds: Callable = is_set,
    *,
    block: tuple[int, int] | None = None,
) -> jax.Array:
    """Where `holds`, packed along the second to last axis: uint8[..., rows/8, columns].

    Args:
      x: [..., rows, columns]. Booleans are written as bytes first, by XLA.
      holds: tells it of a tile of x, in float32 or int32.
      block: (rows, columns), multiples of 256 and 128, or all of theirs.
    """
    if x.dtype.name not in _DTYPES or x.ndim < 2 or x.size == 0:
        raise NotImplementedError(
            f"two axes or more, not empty, of {', '.join(_DTYPES)}: not {x.dtype.name}"
            f"{list(x.shape)}"
        )
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    *lead, rows, columns = x.shape
    x = x.reshape(math.prod(lead), rows, columns)
    grid, full, packed = _grid(x.shape, block)
    out = pl.pallas_call(
        functools.partial(_pack, holds=holds, rows=rows),
        out_shape=like(x, (x.shape[0], -(-rows // 8), columns), jnp.uint8),
        grid=grid,
        in_specs=[full],
        out_specs=packed,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        name="jaxmem_pack",
    )(x)
    return out.reshape(*lead, *out.shape[1:])


def _pack(x_ref, packed_ref, *, holds, rows):
    x = x_ref[...]
    wide = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32
    bit = holds(x.astype(wide)).astype(jnp.int32)
    if rows % 8:  # outside of x is anything
        row = lax.broadcasted_iota(jnp.int32, bit.shape, 0)
        bit = jnp.where(row + pl.program_id(1) * bit.shape[0] < rows, bit, 0)
    packed_ref[...] = pack_rows(bit).astype(jnp.uint8)


def unpack(
    packed: jax.Array, rows: int, *, block: tuple[int, int] | None = None
) -> jax.Array:
    """The booleans [..., rows, columns] of `pack`; `block` as there."""
    if packed.dtype != jnp.uint8 or packed.ndim < 2 or packed.size == 0:
        raise NotImplementedError("two axes or more, not empty, of uint8")
    *lead, _, columns = packed.shape
    packed = packed.reshape(-1, *packed.shape[-2:])
    shape = (packed.shape[0], rows, columns)
    grid, full, bytes_ = _grid(shape, block)
    out = pl.pallas_call(
        _unpack,
        out_shape=like(packed, shape, jnp.uint8),
        grid=grid,
        in_specs=[bytes_],
        out_specs=full,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        name="jaxmem_unpack",
    )(packed)
    return out.reshape(*lead, rows, columns) != 0


def _unpack(packed_ref, out_ref):
    out_ref[...] = unpack_rows(packed_ref[...].astype(jnp.int32)).astype(jnp.uint8)


def _grid(shape, block):
    """The grid over [lead, rows, columns], and blocks of elements and of bytes."""
    lead, rows, columns = shape
    high, wide = block or (_ROWS, _COLUMNS)
    high = min(high, 8 * -(-rows // 8))
    wide = min(wide, columns if columns < LANES else LANES * -(-columns // LANES))
    grid = (lead, pl.cdiv(rows, high), pl.cdiv(columns, wide))
    at = lambda i, j, k: (i, j, k)
    return (
        grid,
        pl.BlockSpec((None, high, wide), at),
        pl.BlockSpec((None, high // 8, wide), at),
    )
