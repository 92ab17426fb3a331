"""Booleans eight to a byte on GPU: rows 8r .. 8r + 7 share the bytes of row r.

That is the layout of XLA's twin, which packs along the second to last axis. A program
loads a stretch of each of eight rows, an element of each to a thread, so a byte is
made of eight registers of one thread, and no thread asks another.

Not optimal: rows are read in stretches of 128 to 512 elements, a stretch a program.

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
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._compat import varying_as, with_layout

THREADS = 128  # a warpgroup
_VECTOR = 4
_DTYPES = ("bool", "int8", "uint8", "int32", "float16", "bfloat16", "float32")


def pack_eight(codes, bits: int = 1) -> list:
    """Eight int32 arrays of codes -> `bits` int32 arrays of bytes, one a plane."""
    planes = []
    for b in range(bits):
        spread = [((code >> b) & 1) << j for j, code in enumerate(codes)]
        planes.append(functools.reduce(lambda x, y: x | y, spread))
    return planes


def unpack_eight(planes) -> list:
    """The eight arrays of codes that `pack_eight` packed."""
    return [
        functools.reduce(
            lambda x, y: x | y,
            [((plane >> j) & 1) << b for b, plane in enumerate(planes)],
        )
        for j in range(8)
    ]


def is_set(x):
    return x != 0


def pack(
    x: jax.Array, holds: Callable = is_set, *, block: int | None = None
) -> jax.Array:
    """Where `holds`, packed along the second to last axis: uint8[..., rows/8, columns].

    Args:
      x: [..., rows, columns], columns a multiple of 128. Booleans are written as bytes
        first, by XLA.
      holds: tells it of a tile of x, in float32 or int32.
      block: columns of a program, a multiple of 128 that divides the columns.
    """
    if x.dtype.name not in _DTYPES:
        raise NotImplementedError(f"{', '.join(_DTYPES)}, not {x.dtype.name}")
    _check(x)
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    *lead, rows, columns = x.shape
    groups, width = -(-rows // 8), block or _width(columns)
    shape = (*lead, groups, columns)
    out = plgpu.kernel(
        functools.partial(_pack, holds=holds, shape=x.shape, width=width),
        out_type=jax.ShapeDtypeStruct((math.prod(shape),), jnp.uint8),
        grid=(math.prod(lead) * groups, columns // width),
        grid_names=("group", "stretch"),
        kernel_name="jaxmem_pack",
    )(x.reshape(-1))
    return varying_as(out.reshape(shape), jax.typeof(x))


def _pack(x_ref, packed_ref, *, holds, shape, width):
    wide = jnp.float32 if jnp.issubdtype(x_ref.dtype, jnp.floating) else jnp.int32
    byte, rows, layout = _place(shape, width)
    bits = []
    for start, is_row in rows:
        x = with_layout(x_ref[pl.ds(start, width)], layout)
        one = jnp.where(is_row, jnp.int32(1), jnp.int32(0))
        bits.append(jnp.where(holds(x.astype(wide)), one, jnp.int32(0)))
    packed_ref[pl.ds(byte, width)] = pack_eight(bits)[0].astype(jnp.uint8)


def unpack(packed: jax.Array, rows: int, *, block: int | None = None) -> jax.Array:
    """The booleans [..., rows, columns] of `pack`; `block` as there."""
    if packed.dtype != jnp.uint8:
        raise NotImplementedError(f"uint8, not {packed.dtype.name}")
    _check(packed)
    *lead, groups, columns = packed.shape
    shape, width = (*lead, rows, columns), block or _width(columns)
    out = plgpu.kernel(
        functools.partial(_unpack, shape=shape, width=width),
        out_type=jax.ShapeDtypeStruct((math.prod(shape),), jnp.uint8),
        grid=(math.prod(lead) * groups, columns // width),
        grid_names=("group", "stretch"),
        kernel_name="jaxmem_unpack",
    )(packed.reshape(-1))
    return varying_as(out.reshape(shape) != 0, jax.typeof(packed))


def _unpack(packed_ref, out_ref, *, shape, width):
    byte, rows, layout = _place(shape, width)
    packed = with_layout(packed_ref[pl.ds(byte, width)], layout).astype(jnp.int32)
    for (start, is_row), bit in zip(rows, unpack_eight([packed]), strict=True):

        @pl.when(is_row)
        def _(start=start, bit=bit):
            out_ref[pl.ds(start, width)] = bit.astype(jnp.uint8)


def _place(shape, width):
    """Where a program's bytes start; where its eight rows do, and if they are rows."""
    *_, rows, columns = shape
    groups = jnp.int32(-(-rows // 8))
    group, column = lax.axis_index("group"), lax.axis_index("stretch") * width
    lead, first = lax.div(group, groups), lax.rem(group, groups) * 8
    places = []
    for j in range(8):
        row = jnp.minimum(first + j, rows - 1)
        places.append(((lead * rows + row) * columns + column, first + j < rows))
    vector = math.gcd(_VECTOR, width // THREADS)
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vector)
    return group * columns + column, places, layout


def _check(x) -> None:
    if x.ndim < 2 or x.shape[-1] % THREADS or not 0 < x.size < 2**31:
        raise NotImplementedError(
            "two axes or more, the last a multiple of 128, of less than 2**31 elements:"
            f" not {list(x.shape)}"
        )


def _width(columns: int) -> int:
    return math.gcd(columns, THREADS * _VECTOR)
