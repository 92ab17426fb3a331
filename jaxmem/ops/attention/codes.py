"""What attention keeps, as codes of a few bits: one step for each position and head.

Rounding is to the nearest code: the softmax between the two products makes no mean
exact anyway.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from jaxmem.ops.codes.quantization import Quantization, bits_or_none
from jaxmem.ops.codes.stored import codes_of

NAMES = ("q", "k", "v", "o")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes"],
    meta_fields=["shape", "dtype"],
)
@dataclass(frozen=True)
class Coded:
    """The codes of an array of this shape and dtype."""

    codes: Any
    shape: tuple[int, ...]
    dtype: Any


def _is_coded(x: Any) -> bool:
    return isinstance(x, Coded)


def head_codes(save: Any) -> Quantization | None:
    quantization = bits_or_none("dot_product_attention", save)
    if quantization is None or isinstance(save, Quantization):
        return quantization
    if quantization.dtype is not None:
        return quantization
    # Queries, keys and values lie about zero, and heads differ in size: symmetric
    # codes, a block for each head.
    return Quantization(quantization.bits, quantization.block_size, symmetric=True)


def code(saved: dict[str, Any], quantization: Quantization | None) -> dict[str, Any]:
    """The residuals, with codes in place of what `quantization` is for."""
    if quantization is None:
        return saved
    named = {n: x for n, x in saved.items() if n in NAMES and not _is_coded(x)}
    coded = {
        n: Coded(codes_of(x, quantization), x.shape, x.dtype) for n, x in named.items()
    }
    return saved | coded


def recall(saved: dict[str, Any], g: Any) -> tuple[dict[str, Any], Any]:
    """The residuals as the backward pass reads them, and its cotangent `g`."""
    coded = {n: x for n, x in saved.items() if _is_coded(x)}
    if coded and not isinstance(g, SymbolicZero):
        # XLA would else decode the codes of unrolled layers before the cotangent is
        # there, and hold what they stand for. Both are read as the barrier gives them
        # back: a compiler may take out what nobody reads behind one.
        coded, g = jax.lax.optimization_barrier((coded, g))
    return saved | {n: x.codes.recall(x) for n, x in coded.items()}, g
