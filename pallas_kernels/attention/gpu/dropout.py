"""Dropout of a tile of probabilities on Hopper: a word of the generator for two keys.

A thread holds two neighbours of a row of a tile in one register of bfloat16 or float16,
or in two of float32; `hashing` draws both from one word. As float16 numbers without
their signs the halves of a word are ordered as their 15 bits are, with NaN above all
others. So one instruction compares both, and one masks both where they have 16 bits.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._compat import mlir_parts
from pallas_kernels.hashing import half_threshold

_INFINITY = 0x7C00  # of float16; no half is compared with NaN, which lie above it
LARGEST_RATE = _INFINITY / 2**15

# Results, elements, a word and a threshold.
_PACKED = """{
.reg .b32 half, keep;
abs.f16x2 half, $2;
set.geu.u32.f16x2 keep, half, $3;
and.b32 $0, $1, keep;
}"""
_APART = """{
.reg .b32 half;
.reg .pred first, second;
.reg .f32 a, b;
abs.f16x2 half, $3;
setp.geu.f16x2 first|second, half, $4;
selp.f32 a, $1, 0f00000000, first;
selp.f32 b, $2, 0f00000000, second;
mov.b64 $0, {a, b};
}"""


def drop(x, words, rate: float) -> jax.Array:
    """`x` with zeros where dropout has them.

    Args:
      x: [queries, keys], float32 or of 16 bits.
      words: uint32 of the same shape; a pair of keys takes that of the first.
      rate: at most `LARGEST_RATE`.
    """
    layout, dtype = plgpu.Layout.WGMMA, jnp.dtype(x.dtype)
    result = plgpu.ShapeDtypeStruct(x.shape, dtype, layout=layout)
    masked = _masked_packed if dtype.itemsize == 2 else _masked_apart

    def by_register(_, x, words):
        new = x.registers.copy()
        for at, pair in np.ndenumerate(x.registers):
            new[at] = masked(pair, _element(words.registers[at], 0), rate)
        return mgpu.FragmentedArray(_registers=new, _layout=x.layout, _is_signed=None)

    inline: Any = plgpu.inline_mgpu(arg_types=(layout, layout), return_type=result)
    return inline(by_register)(x, words)


def _element(register, i: int):
    extract = mlir_parts().vector.extract
    return extract(register, dynamic_position=[], static_position=[i])


def _as(kind, x):
    """The bits of a scalar as a vector type."""
    mlir = mlir_parts()
    alone = mlir.vector.broadcast(mlir.ir.VectorType.get((1,), x.type), x)
    return mlir.vector.bitcast(kind, alone)


def _run(text: str, constraints: str, result, operands, rate: float) -> Any:
    """PTX of the operands and of the threshold in both halves of a word."""
    mlir = mlir_parts()
    i32 = mlir.ir.IntegerType.get_signless(32)
    threshold = mlir.arith.constant(i32, half_threshold(rate) * 0x10001)
    return mlir.llvm.inline_asm(result, [*operands, threshold], text, constraints)


def _masked_packed(pair, word, rate: float):
    """Of a register vector<2 x 16 bits>."""
    mlir = mlir_parts()
    as_word = mlir.vector.bitcast(mlir.ir.VectorType.get((1,), word.type), pair)
    operands = _element(as_word, 0), word
    return _as(pair.type, _run(_PACKED, "=r,r,r,r", word.type, operands, rate))


def _masked_apart(pair, word, rate: float):
    """Of a register vector<2 x f32>."""
    i64 = mlir_parts().ir.IntegerType.get_signless(64)
    operands = _element(pair, 0), _element(pair, 1), word
    return _as(pair.type, _run(_APART, "=l,f,f,r,r", i64, operands, rate))
