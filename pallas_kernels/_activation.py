"""Elementwise kernels that keep a code an element: what they share, and plain twins.

The forward kernel reads x once and writes `value(x)` and the bits of `code(x)`, a
number below 2**bits: which side of a minimum x lies on, or which stretch of the line.
The backward kernel reads the cotangent g, the codes and perhaps one array more, and
writes `slope(code, kept) * g` over g. `value`, `code` and `slope` come from the
caller: jnp operations on float32 tiles that Mosaic lowers (`exp`, `tanh`, `log`,
`rsqrt` and `where` on either platform; `erfc` on neither, `sqrt` not on every GPU).

Codes are bit planes, eight elements to a byte. Which eight is up to the platform
(`bits_tpu.py`, `bits_gpu.py`); shape and bytes are the same, so that a program can be
lowered for any. The shape follows the two last axes of x, as the layout of a TPU does,
so that neither arrays nor codes are copied into another one.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tile = Any
Function = Callable[..., Tile]
MOST_BITS = 4  # a code costs a comparison for each of 2**bits - 1 borders
LANES, SUBLANES = 128, 8
FEW_ROWS = 32  # under which the padding of rows to eights is felt


def view(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(lead, rows, columns): as a TPU lays it out; codes share a byte along rows.

    Rows of fewer than 8 in all are folded into lanes, with up to 1023 elements more.
    """
    rows, columns = (1, 1, *shape)[-2:]
    lead = math.prod(shape[:-2])
    if rows % SUBLANES and rows < FEW_ROWS:
        lead, rows = 1, lead * rows
    if lead * rows < SUBLANES:
        lead, columns, size = 1, LANES, lead * rows * columns
        rows = SUBLANES * -(-size // (SUBLANES * LANES))
    return lead, rows, columns


def packed_shape(shape: tuple[int, ...], bits: int) -> tuple[int, int, int, int]:
    """The shape of the bytes that hold a code of so many bits an element."""
    lead, rows, columns = view(shape)
    return bits, lead, -(-rows // 8), columns


def check(dtypes: tuple[str, ...], *arrays: jax.Array, bits: int = 0) -> None:
    """NotImplementedError for what no kernel does."""
    found = sorted({x.dtype.name for x in arrays} - set(dtypes))
    if found:
        raise NotImplementedError(f"{' and '.join(dtypes)}, not {', '.join(found)}")
    if not 0 < arrays[0].size < 2**31:
        raise NotImplementedError(f"1 to 2**31 - 1 elements, not {arrays[0].size}")
    if bits > MOST_BITS:
        raise NotImplementedError(f"codes of at most {MOST_BITS} bits, not {bits}")


def float32(*tiles: Tile) -> tuple[Tile, ...]:
    return tuple(tile.astype(jnp.float32) for tile in tiles)


# -- the plain twins: functions of `activation_tpu.py` and `activation_gpu.py`, which
# need not agree with them on which elements share a byte; the gated ones are also what
# the kernels do to a tile


def forward(x: jax.Array, *, value: Function, code: Function, bits: int):
    (wide,) = float32(x)
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


def backward(g: jax.Array, packed: jax.Array, *kept: jax.Array, slope: Function):
    bits, lead, rows, columns = packed.shape
    spread = packed.astype(jnp.int32)[:, :, :, None]
    spread = (spread >> jnp.arange(8, dtype=jnp.int32)[None, None, None, :, None]) & 1
    spread = spread.reshape(bits, lead, 8 * rows, columns)[:, :, : view(g.shape)[1]]
    places = jnp.arange(bits, dtype=jnp.int32)[:, None, None, None]
    codes = jnp.sum(spread << places, axis=0, dtype=jnp.int32)
    codes = codes.reshape(-1)[: g.size].reshape(g.shape)
    wide, *others = float32(g, *kept)
    return (slope(codes, *others) * wide).astype(g.dtype)


def gated_forward(gate: jax.Array, up: jax.Array, *, value: Function):
    a, b = float32(gate, up)
    return (value(a) * b).astype(gate.dtype)


def gated_backward(g: jax.Array, gate: jax.Array, up: jax.Array, *, both: Function):
    t, a, b = float32(g, gate, up)
    value, slope = both(a)
    return (t * b * slope).astype(gate.dtype), (t * value).astype(up.dtype)
