"""Activation kernels for GPUs; `reference.py` describes what is computed and saved.

A program takes a stretch of eight consecutive rows, up to four elements of each to a
thread. The eight elements of a byte are then in registers of one thread, and threads
exchange nothing. Codes are packed as XLA's reference packs them, so that each pass may
be a kernel or XLA. For 16-bit arrays `exp`, `log` and `rsqrt` are the chip's fast
approximations, right to about 2**-21. The backward pass writes over the cotangent.

Memory traffic for n elements of s bytes and codes of b bits: forward n (2 s + b/8);
backward n (2 s + b/8), and n s more where the output was saved.

Limits: loads go to registers without TMA, so only other programs of the same processor
hide their latency. A derivative computed from an output takes about a hundred
operations an element; in bfloat16 an H100 is then bound by arithmetic, not by memory.
So it is by codes of more than some 5 bits, each bit of which doubles the selections.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._compat import traced_late
from pallas_kernels.activation import reference
from pallas_kernels.activation.reference import Function, float32
from pallas_kernels.arrays import like
from pallas_kernels.bits.gpu import EightRows, pack_eight, unpack_eight
from pallas_kernels.gpu import THREADS, launch, update_in_place

DTYPES = ("float32", "bfloat16", "float16")


def forward(
    x: jax.Array, *, value: Function, code: Function, bits: int,
    block: int | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`value(x)`, and the bits of `code(x)`."""
    rows = _rows(x.shape, block)
    reference.check(DTYPES, x)
    shape = reference.packed_shape(x.shape, bits)
    run = functools.partial(_forward, rows, step=(value, code, bits))
    y, packed = _one_by_one(run, x.reshape(-1))
    return y.reshape(x.shape), packed.reshape(shape)


def backward(
    g: jax.Array, packed: jax.Array, *saved: jax.Array, slope: Function,
    block: int | None = None,
) -> jax.Array:  # fmt: skip
    """`slope(code, *saved) * g`, written over g."""
    rows = _rows(g.shape, block)
    reference.check(DTYPES, g, *saved)
    run = functools.partial(_backward, rows, slope=slope, bits=packed.shape[0])
    (dx,) = _one_by_one(run, *(array.reshape(-1) for array in (g, packed, *saved)))
    return dx.reshape(g.shape)


def _rows(shape: tuple[int, ...], block: int | None) -> EightRows:
    view = reference.view(shape)
    if view[-1] % THREADS or math.prod(view) != math.prod(shape):
        raise NotImplementedError(
            f"rows of a multiple of {THREADS} elements, and a multiple of 8 of them or "
            f"at least {reference.FEW_ROWS}, not {list(shape)}"
        )
    return EightRows(view, block)


def _forward(rows: EightRows, x, *, step):
    value, code, bits = step

    def body(refs):
        here = rows.here()
        wide = [float32(tile) for tile in here.load(refs["x"])]
        packed = pack_eight(here.zero_past_end([code(w) for w in wide]), bits)
        here.store(refs["y"], [value(w).astype(x.dtype) for w in wide])
        here.store_bytes(refs["packed"], packed)

    size = bits * rows.bytes
    outs = {"y": like(x, x.shape, x.dtype), "packed": like(x, (size,), jnp.uint8)}
    how = outs, rows.grid, None, _params(x.dtype)
    new = launch("jaxmem_activation_forward", body, {"x": x}, *how)
    return new["y"], new["packed"]


def _backward(rows: EightRows, g, packed, *saved, slope, bits: int):
    names = [f"saved{n}" for n in range(len(saved))]

    def body(refs):
        here = rows.here()
        codes = unpack_eight(here.load_bytes(refs["packed"], bits))
        arrays = [here.load(refs[name]) for name in ("g", *names)]
        tiles = zip(arrays[0], codes, *arrays[1:], strict=True)
        here.store(refs["g"], [reference.scaled(slope, *tile) for tile in tiles])

    inputs = {"g": g, "packed": packed, **dict(zip(names, saved, strict=True))}
    how = rows.grid, None, _params(g.dtype)
    new = update_in_place("jaxmem_activation_backward", body, inputs, ("g",), *how)
    return (new["g"],)


def _params(dtype):
    # The fast approximations are exact enough for 16 bits only.
    return plgpu.CompilerParams(approx_math=dtype.itemsize == 2)


def _one_by_one(run: Callable[..., tuple], *arrays) -> tuple:
    """`run(*arrays)`; under `vmap` the examples run one after the other."""

    def under_vmap(*many):
        return jax.lax.map(lambda each: _one_by_one(run, *each), many)

    return traced_late(run, under_vmap, *arrays)
