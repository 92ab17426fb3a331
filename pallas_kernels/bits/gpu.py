"""Packing of booleans on GPUs; the package describes the layout.

A program loads a stretch of each of eight rows, an element of each to a thread, so a
byte is made of eight registers of one thread, and threads exchange nothing.

Limits: a program reads only 128 to 512 consecutive elements of each row.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._compat import with_layout
from pallas_kernels.arrays import check_dtypes, like
from pallas_kernels.bits import is_set
from pallas_kernels.chips import needs
from pallas_kernels.gpu import THREADS, launch
from pallas_kernels.lowering import for_chip

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


def pack(
    x: jax.Array, holds: Callable = is_set, *, block: int | None = None
) -> jax.Array:
    """Where `holds`, packed along the second to last axis: uint8[..., rows/8, columns].

    Args:
      x: [..., rows, columns], columns a multiple of 128. XLA writes booleans as bytes
        first.
      holds: predicate of a tile of x in float32 or int32.
      block: columns of a program, a multiple of 128 that divides the columns.

    Raises:
      NotImplementedError: for another dtype or shape.
    """
    check_dtypes(_DTYPES, x)
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    out = *x.shape[:-2], -(-x.shape[-2] // 8), x.shape[-1]
    body = functools.partial(_pack, holds=holds)
    return _launch("jaxmem_pack", body, x, out, x.shape, block)


def _pack(x_ref, packed_ref, width: int, byte, rows, layout, *, holds):
    wide = jnp.float32 if jnp.issubdtype(x_ref.dtype, jnp.floating) else jnp.int32
    bits = []
    for start, is_row in rows:
        x = with_layout(x_ref[pl.ds(start, width)], layout)
        one = jnp.where(is_row, jnp.int32(1), jnp.int32(0))
        bits.append(jnp.where(holds(x.astype(wide)), one, jnp.int32(0)))
    packed_ref[pl.ds(byte, width)] = pack_eight(bits)[0].astype(jnp.uint8)


def unpack(packed: jax.Array, rows: int, *, block: int | None = None) -> jax.Array:
    """The booleans [..., rows, columns] of `pack`; `block` as there."""
    check_dtypes(("uint8",), packed)
    shape = *packed.shape[:-2], rows, packed.shape[-1]
    return _launch("jaxmem_unpack", _unpack, packed, shape, shape, block) != 0


def _unpack(packed_ref, out_ref, width: int, byte, rows, layout):
    packed = with_layout(packed_ref[pl.ds(byte, width)], layout).astype(jnp.int32)
    for (start, is_row), bit in zip(rows, unpack_eight([packed]), strict=True):

        @pl.when(is_row)
        def _(start=start, bit=bit):
            out_ref[pl.ds(start, width)] = bit.astype(jnp.uint8)


def _launch(name: str, body, x, out, shape, block: int | None):
    """`body` for each stretch of each eight rows of `shape`: uint8 of shape `out`."""
    if x.ndim < 2 or x.shape[-1] % THREADS or not 0 < x.size < 2**31:
        raise NotImplementedError(
            "two axes or more, the last a multiple of 128, of less than 2**31 elements:"
            f" not {list(x.shape)}"
        )
    *lead, rows, columns = shape
    width = block or math.gcd(columns, THREADS * _VECTOR)
    grid = {"group": math.prod(lead) * -(-rows // 8), "stretch": columns // width}
    run = lambda refs: body(refs["x"], refs["out"], width, *_place(shape, width))
    outs = {"out": like(x, (math.prod(out),), jnp.uint8)}
    inputs = for_chip({"x": x.reshape(-1)}, needs("bits", "cuda"))
    return launch(name, run, inputs, outs, grid)["out"].reshape(out)


def _place(shape, width: int):
    """(start of a program's bytes, (start, is a row) of its eight rows, the layout)."""
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
