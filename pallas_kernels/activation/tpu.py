"""Activation kernels for TPUs; `reference.py` describes what is computed and saved.

Codes are packed as in `bits.tpu`, along the rows of [lead, rows, columns]. A grid step
moves a block of about half a mebibyte of each array and computes on chunks of it of
about 32 registers, so that values between two operations stay in registers. The
backward pass aliases its output to the cotangent.

Memory traffic for n elements of s bytes and codes of b bits: forward n (2 s + b/8);
backward n (2 s + b/8), and n s more where the output was saved.

Limits: in bfloat16 `exp`, `tanh` and `log` take longer than the memory traffic, and so
do codes of more than some 4 bits, each bit of which doubles the selections. Arrays of
fewer than 8 rows, and of rows that are neither a multiple of 8 nor at least 32, are
copied into another layout.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _compat
from pallas_kernels.activation import reference
from pallas_kernels.activation.reference import Function, float32
from pallas_kernels.arrays import LANES, like
from pallas_kernels.bits.tpu import pack_rows, unpack_rows

DTYPES = ("float32", "bfloat16")
_ROWS = 256  # 32 rows of bytes, a whole tile of them
_CHUNK = _ROWS * LANES  # elements: 32 registers of float32
_BLOCK = 2**19  # bytes
Block = tuple[int, int, int]


def forward(
    x: jax.Array, *, value: Function, code: Function, bits: int,
    block: Block | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`value(x)`, and the bits of `code(x)`."""
    reference.check(DTYPES, x)

    def step(x):
        wide = float32(x)
        codes = code(wide)
        planes = [pack_rows((codes >> b) & 1) for b in range(bits)]
        return value(wide).astype(x.dtype), planes

    packed = reference.packed_shape(x.shape, bits)
    y, packed = _sweep(step, [_folded(x)], [x.dtype, packed], block)
    return _unfolded(y, x), packed


def backward(
    g: jax.Array, packed: jax.Array, *saved: jax.Array, slope: Function,
    block: Block | None = None,
) -> jax.Array:  # fmt: skip
    """`slope(code, *saved) * g`, written over g."""
    reference.check(DTYPES, g, *saved)

    def step(g, planes, *saved):
        bits = [unpack_rows(p.astype(jnp.int32)) << b for b, p in enumerate(planes)]
        codes = functools.reduce(lambda x, y: x | y, bits)
        return [reference.scaled(slope, g, codes, *saved)]

    arrays = [_folded(g), packed, *map(_folded, saved)]
    (dx,) = _sweep(step, arrays, [g.dtype], block, aliases={0: 0})
    return _unfolded(dx, g)


def _folded(x: jax.Array) -> jax.Array:
    """x as [lead, rows, columns], padded with zeros to full lanes."""
    view = reference.view(x.shape)
    missing = math.prod(view) - x.size
    if missing:
        x = jnp.pad(x.reshape(-1), (0, missing))
    return x.reshape(view)


def _unfolded(x: jax.Array, original: jax.Array) -> jax.Array:
    x = x if x.size == original.size else x.reshape(-1)[: original.size]
    return x.reshape(original.shape)


class _ChunkedBlock(NamedTuple):
    """A block of [lead, rows, columns], and how many columns are computed at once."""

    block: Block
    wide: int


def _blocks(view: Block, itemsize: int, block: Block | None) -> _ChunkedBlock:
    lead, rows, columns = view
    high = min(block[1] if block else _ROWS, 8 * -(-rows // 8))
    wide = _share(columns, max(LANES, _CHUNK // high))
    most = max(1, _BLOCK // (high * wide * itemsize))
    broad = wide * min(most, -(-columns // wide))
    if block:
        broad = min(block[2], LANES * -(-columns // LANES))
        wide = math.gcd(wide, broad)
    deep = block[0] if block else max(1, _BLOCK // (high * broad * itemsize))
    return _ChunkedBlock((min(deep, lead) if high >= rows else 1, high, broad), wide)


def _share(columns: int, most: int) -> int:
    """Columns of a chunk: multiples of 128, few chunks, all of one size."""
    if columns < LANES:
        return columns
    lanes = -(-columns // LANES)
    return LANES * -(-lanes // -(-lanes // (most // LANES)))


def _sweep(step, arrays, outs, block, aliases=None):
    """`step` over all chunks of arrays [lead, rows, columns] and of packed bits.

    `outs` has the dtype of each output, or the shape of packed bits, which `step` takes
    and returns as a list of planes.
    """
    first = arrays[0]
    blocks = _blocks(first.shape, first.dtype.itemsize, block)
    at = lambda i, j, k: (i, j, k)
    full = pl.BlockSpec(blocks.block, at)
    deep, high, broad = blocks.block

    def bytes_(bits):
        return pl.BlockSpec(
            (bits, deep, high // 8, broad), lambda *ijk: (jnp.int32(0), *ijk)
        )

    is_ragged = any(n % b for n, b in zip(first.shape, blocks.block, strict=True))
    return pl.pallas_call(
        functools.partial(_kernel, step=step, inputs=len(arrays), wide=blocks.wide),
        out_shape=[
            like(first, out, jnp.uint8)
            if isinstance(out, tuple)
            else like(first, first.shape, out)
            for out in outs
        ],
        grid=tuple(map(pl.cdiv, first.shape, blocks.block)),
        in_specs=[bytes_(x.shape[0]) if x.ndim == 4 else full for x in arrays],
        out_specs=[bytes_(o[0]) if isinstance(o, tuple) else full for o in outs],
        input_output_aliases=_compat.aliases(aliases or {}, ragged=is_ragged),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        name="jaxmem_activation",
    )(*arrays)


def _kernel(*refs, step, inputs, wide):
    deep, _, broad = refs[0].shape
    across = jnp.int32(broad // wide)

    def chunk(number, carry):
        lead, column = lax.div(number, across), lax.rem(number, across) * wide
        at = lead, slice(None), pl.ds(pl.multiple_of(column, wide), wide)
        outs = step(*(_load(ref, at) for ref in refs[:inputs]))
        for ref, out in zip(refs[inputs:], outs, strict=True):
            _store(ref, at, out)
        return carry

    lax.fori_loop(jnp.int32(0), deep * across, chunk, jnp.int32(0))


def _load(ref, at):
    return ref[at] if ref.ndim == 3 else [ref[b, *at] for b in range(ref.shape[0])]


def _store(ref, at, out):
    if ref.ndim == 3:
        ref[at] = out
        return
    for b, plane in enumerate(out):
        ref[b, *at] = plane.astype(jnp.uint8)
