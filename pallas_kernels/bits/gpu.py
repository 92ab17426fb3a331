"""Packing of booleans on GPUs; the package describes the layout.

A program loads a stretch of each of eight rows, up to four elements of each to a
thread, so a byte is made of eight registers of one thread, and threads exchange
nothing.

Limits: a program reads only 128 to 512 consecutive elements of each row.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

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

_VECTOR = 4  # elements of a thread's load; with 8 of bfloat16 registers would spill
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


class EightRows:
    """Programs that take a stretch of eight rows each; arrays are flat.

    Attributes:
      grid: of the programs, as `launch` takes it.
      bytes: in which a bit of each element fits, those of all programs.
    """

    def __init__(self, shape: tuple[int, ...], block: int | None = None):
        """`shape` [..., rows, columns]; `block`: columns of a program."""
        *lead, self._rows, self._columns = shape
        self._width = block or math.gcd(self._columns, THREADS * _VECTOR)
        groups = math.prod(lead) * -(-self._rows // 8)
        self.grid = {"group": groups, "stretch": self._columns // self._width}
        self.bytes = groups * self._columns

    def here(self) -> "Stretch":
        """What the program that asks takes."""
        groups = jnp.int32(-(-self._rows // 8))
        group = lax.axis_index("group")
        column = lax.axis_index("stretch") * self._width
        lead, first = lax.div(group, groups), lax.rem(group, groups) * 8
        starts, there = [], []
        for j in range(8):
            row = jnp.minimum(first + j, self._rows - 1)
            starts.append((lead * self._rows + row) * self._columns + column)
            there.append(None if self._rows % 8 == 0 else first + j < self._rows)
        byte = group * self._columns + column
        return Stretch(self._width, starts, there, byte, self.bytes)


class Stretch(NamedTuple):
    """A stretch of eight rows; `there` is where a row is, or None: everywhere."""

    width: int
    starts: list
    there: list
    byte: Any
    plane: int

    def _layout(self, x):
        vector = math.gcd(_VECTOR, self.width // THREADS)
        layout = plgpu.Layout.WG_STRIDED((self.width,), vec_size=vector)
        return with_layout(x, layout)

    def load(self, ref) -> list:
        """The eight rows; in the place of those past the end is the last one."""
        return [self._layout(ref[pl.ds(start, self.width)]) for start in self.starts]

    def store(self, ref, rows) -> None:
        for start, is_row, row in zip(self.starts, self.there, rows, strict=True):
            if is_row is None:
                ref[pl.ds(start, self.width)] = row
                continue

            @pl.when(is_row)
            def _(start=start, row=row):
                ref[pl.ds(start, self.width)] = row

    def zero_past_end(self, codes) -> list:
        """int32 codes, zero in the place of rows past the end."""
        # by a product: jax 0.12 selects by arrays of the same shape alone
        return [
            code if is_row is None else code * is_row.astype(jnp.int32)
            for code, is_row in zip(codes, self.there, strict=True)
        ]

    def load_bytes(self, ref, bits: int = 1) -> list:
        """int32 planes."""
        return [self._layout(ref[at]).astype(jnp.int32) for at in self._bytes(bits)]

    def store_bytes(self, ref, planes) -> None:
        for at, plane in zip(self._bytes(len(planes)), planes, strict=True):
            ref[at] = plane.astype(jnp.uint8)

    def _bytes(self, bits: int) -> list:
        return [pl.ds(b * self.plane + self.byte, self.width) for b in range(bits)]


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


def _pack(x_ref, packed_ref, here: Stretch, *, holds):
    wide = jnp.float32 if jnp.issubdtype(x_ref.dtype, jnp.floating) else jnp.int32
    one, zero = jnp.int32(1), jnp.int32(0)
    bits = [jnp.where(holds(x.astype(wide)), one, zero) for x in here.load(x_ref)]
    here.store_bytes(packed_ref, pack_eight(here.zero_past_end(bits)))


def unpack(packed: jax.Array, rows: int, *, block: int | None = None) -> jax.Array:
    """The booleans [..., rows, columns] of `pack`; `block` as there."""
    check_dtypes(("uint8",), packed)
    shape = *packed.shape[:-2], rows, packed.shape[-1]
    return _launch("jaxmem_unpack", _unpack, packed, shape, shape, block) != 0


def _unpack(packed_ref, out_ref, here: Stretch):
    bits = unpack_eight(here.load_bytes(packed_ref))
    here.store(out_ref, [bit.astype(jnp.uint8) for bit in bits])


def _launch(name: str, body, x, out, shape, block: int | None):
    """`body` for each stretch of each eight rows of `shape`: uint8 of shape `out`."""
    if x.ndim < 2 or x.shape[-1] % THREADS or not 0 < x.size < 2**31:
        raise NotImplementedError(
            "two axes or more, the last a multiple of 128, of less than 2**31 elements:"
            f" not {list(x.shape)}"
        )
    rows = EightRows(shape, block)
    run = lambda refs: body(refs["x"], refs["out"], rows.here())
    outs = {"out": like(x, (math.prod(out),), jnp.uint8)}
    flat = for_chip({"x": x.reshape(-1)}, needs("bits", "cuda"))
    return launch(name, run, flat, outs, rows.grid)["out"].reshape(out)
