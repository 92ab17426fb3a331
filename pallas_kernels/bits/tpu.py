"""Packing of booleans on TPUs; the package describes the layout.

A tile of float32 or int32 has eight rows, so a byte is a sum over one tile's sublanes,
and columns stay in their lanes: no byte is padding.

Limits: a sum over sublanes costs three rotations. None would be needed if the elements
that share a byte lay in eight tiles, but rows would then have to come in blocks of 256.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.arrays import LANES, like
from pallas_kernels.bits import is_set

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


def pack(
    x: jax.Array, holds: Callable = is_set, *, block: tuple[int, int] | None = None
) -> jax.Array:
    """Where `holds`, packed along the second to last axis: uint8[..., rows/8, columns].

    Args:
      x: [..., rows, columns]. XLA writes booleans as bytes first.
      holds: predicate of a tile of x in float32 or int32.
      block: (rows, columns), multiples of 256 and 128, or all of theirs.

    Raises:
      NotImplementedError: for another dtype or shape.
    """
    _check(x, _DTYPES)
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    rows = x.shape[-2]
    body = functools.partial(_pack, holds=holds, rows=rows)
    return _launch("jaxmem_pack", body, x, (rows, -(-rows // 8)), block)


def _pack(x_ref, packed_ref, *, holds, rows):
    x = x_ref[...]
    wide = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32
    bit = holds(x.astype(wide)).astype(jnp.int32)
    if rows % 8:  # past the end of x a block holds arbitrary values
        row = lax.broadcasted_iota(jnp.int32, bit.shape, 0)
        bit = jnp.where(row + pl.program_id(1) * bit.shape[0] < rows, bit, 0)
    packed_ref[...] = pack_rows(bit).astype(jnp.uint8)


def unpack(
    packed: jax.Array, rows: int, *, block: tuple[int, int] | None = None
) -> jax.Array:
    """The booleans [..., rows, columns] of `pack`; `block` as there."""
    _check(packed, ("uint8",))
    rows_in_and_out = packed.shape[-2], rows
    return _launch("jaxmem_unpack", _unpack, packed, rows_in_and_out, block) != 0


def _unpack(packed_ref, out_ref):
    out_ref[...] = unpack_rows(packed_ref[...].astype(jnp.int32)).astype(jnp.uint8)


def _check(x, dtypes: tuple[str, ...]) -> None:
    if x.dtype.name not in dtypes or x.ndim < 2 or x.size == 0:
        raise NotImplementedError(
            f"two axes or more, not empty, of {', '.join(dtypes)}: not {x.dtype.name}"
            f"{list(x.shape)}"
        )


def _launch(name: str, body, x, rows: tuple[int, int], block):
    """`body` for each block of x [..., r, columns]: uint8 [..., s, columns]."""
    # `rows` is (r, s); the larger of them counts elements, the smaller one bytes.
    *lead, _, columns = x.shape
    x = x.reshape(math.prod(lead), *x.shape[-2:])
    high, wide = block or (_ROWS, _COLUMNS)
    high = min(high, 8 * -(-max(rows) // 8))
    wide = min(wide, columns if columns < LANES else LANES * -(-columns // LANES))
    heights = (high, high // 8) if body is not _unpack else (high // 8, high)
    specs = [pl.BlockSpec((None, h, wide), lambda i, j, k: (i, j, k)) for h in heights]
    out = pl.pallas_call(
        body,
        out_shape=like(x, (x.shape[0], rows[1], columns), jnp.uint8),
        grid=(x.shape[0], pl.cdiv(max(rows), high), pl.cdiv(columns, wide)),
        in_specs=specs[:1],
        out_specs=specs[1],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        name=name,
    )(x)
    return out.reshape(*lead, rows[1], columns)
