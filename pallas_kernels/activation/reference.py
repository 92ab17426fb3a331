"""Elementwise kernels that save a code for each element: shared parts and reference.

The forward kernel reads x once and writes `value(x)` and the bits of `code(x)`, an
integer below 2**bits: on which side of a minimum x lies, or in which interval. The
backward kernel reads the cotangent g, the codes and perhaps one more array, and writes
`slope(code, *saved) * g` over g. `value`, `code` and `slope` come from the caller. They
are jnp operations on float32 tiles that Mosaic lowers: `exp`, `tanh`, `log`, `rsqrt`
and `where` on either platform; `erfc` on neither, `sqrt` not on every GPU.

Codes are stored as bit planes, eight elements of consecutive rows to a byte, alike on
all platforms: one pass may be a kernel and the other XLA. The shape follows the last
two axes of x, as the layout of a TPU does, so that neither arrays nor codes are copied
into another layout.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arrays import LANES, check_dtypes, float32

Tile = Any
Function = Callable[..., Tile]
SUBLANES = 8
FEW_ROWS = 32  # below this, padding the rows to a multiple of 8 costs noticeably


def view(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(lead, rows, columns) as a TPU lays them out; codes share a byte along rows."""
    # Fewer than 8 rows in all are folded into lanes, with up to 1023 elements of
    # padding.
    rows, columns = (1, 1, *shape)[-2:]
    lead = math.prod(shape[:-2])
    if rows % SUBLANES and rows < FEW_ROWS:
        lead, rows = 1, lead * rows
    if lead * rows < SUBLANES:
        lead, columns, size = 1, LANES, lead * rows * columns
        rows = SUBLANES * -(-size // (SUBLANES * LANES))
    return lead, rows, columns


def packed_shape(shape: tuple[int, ...], bits: int) -> tuple[int, int, int, int]:
    """The shape of the bytes that hold a code of `bits` bits for each element."""
    lead, rows, columns = view(shape)
    return bits, lead, -(-rows // 8), columns


def check(dtypes: tuple[str, ...], *arrays: jax.Array) -> None:
    """Raises NotImplementedError for what no kernel supports."""
    check_dtypes(dtypes, *arrays)
    if not 0 < arrays[0].size < 2**31:
        raise NotImplementedError(f"1 to 2**31 - 1 elements, not {arrays[0].size}")


def scaled(slope: Function, g: Tile, code: Tile, *saved: Tile) -> Tile:
    """`slope(code, *saved) * g` of a tile, in the dtype of g."""
    wide, *others = map(float32, (g, *saved))
    return (slope(code, *others) * wide).astype(g.dtype)


# -- reference implementations of the functions of `tpu.py` and `gpu.py`


def forward(x: jax.Array, *, value: Function, code: Function, bits: int):
    """(`value(x)`, `code(x)` as uint8 of `packed_shape(x.shape, bits)`)."""
    wide = float32(x)
    codes = jnp.pad(code(wide).reshape(-1), (0, math.prod(view(x.shape)) - x.size))
    codes = codes.reshape(view(x.shape))
    _, lead, rows, columns = packed_shape(x.shape, bits)
    codes = jnp.pad(codes, [(0, 0), (0, 8 * rows - codes.shape[1]), (0, 0)])
    codes = codes.reshape(lead, rows, 8, columns)
    places = jnp.arange(8, dtype=jnp.int32)[None, None, :, None]
    planes = [
        jnp.sum(((codes >> b) & 1) << places, axis=2, dtype=jnp.int32)
        for b in range(bits)
    ]
    return value(wide).astype(x.dtype), jnp.stack(planes).astype(jnp.uint8)


def backward(g: jax.Array, packed: jax.Array, *saved: jax.Array, slope: Function):
    """`slope(code, *saved) * g`; the saved arrays have the shape of g."""
    bits, lead, rows, columns = packed.shape
    spread = packed.astype(jnp.int32)[:, :, :, None]
    spread = (spread >> jnp.arange(8, dtype=jnp.int32)[None, None, None, :, None]) & 1
    spread = spread.reshape(bits, lead, 8 * rows, columns)[:, :, : view(g.shape)[1]]
    places = jnp.arange(bits, dtype=jnp.int32)[:, None, None, None]
    codes = jnp.sum(spread << places, axis=0, dtype=jnp.int32)
    codes = codes.reshape(-1)[: g.size].reshape(g.shape)
    return scaled(slope, g, codes, *saved)
