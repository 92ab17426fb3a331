"""The matrix products of a compiled module: of dots, convolutions and library calls."""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from jaxmem.cost.kernel import Product
from jaxmem.cost.library_attention import LibraryAttention
from jaxmem.memory.buffers.hlo import Hlo, Instruction
from jaxmem.memory.buffers.shapes import HloArray, arrays_of
from jaxmem.memory.time.reading import inside

_LABELS = re.compile(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_MOST_TAPS = 2**24  # of an axis: beyond it all taps are taken for products


def products_of(hlo: Hlo, made: Instruction) -> Iterator[Product]:
    """The products that an instruction does, those inside of a fusion too."""
    if made.opcode == "dot":
        yield _dot(hlo, made)
    elif made.opcode == "convolution":
        yield _convolution(hlo, made)
    elif made.opcode == "custom-call":
        for one in _library_call(hlo, made):
            yield dataclasses.replace(one, library=True)
    elif made.opcode in ("fusion", "call", "async-start"):
        for called in made.called:
            for inner in hlo.body(called):
                yield from products_of(hlo, inner)


def _operand(hlo: Hlo, made: Instruction, k: int) -> HloArray:
    return arrays_of(hlo.shape_of(made.operands[k]))[0]


def _dot(hlo: Hlo, made: Instruction) -> Product:
    summed, batch = map(made.listed, ("lhs_contracting_dims", "lhs_batch_dims"))
    return _by_axes(hlo, made, summed, batch)


def _by_axes(hlo: Hlo, made: Instruction, summed: Sequence[int], batch: Sequence[int]):
    """The product of two operands, from the axes of the first."""
    lhs, rhs = _operand(hlo, made, 0), _operand(hlo, made, 1)
    k, many = (math.prod(lhs.sizes[i] for i in of) for of in (summed, batch))
    wide = max(lhs, rhs, key=lambda array: array.bits)
    m, n = lhs.elements // max(1, k * many), rhs.elements // max(1, k * many)
    return Product(many, m, n, k, wide.bits, wide.dtype)


def _convolution(hlo: Hlo, made: Instruction) -> Product:
    """A convolution as a product: output positions by output features.

    TPUs have all products in this form: an axis of a batch, or one of the second
    operand alone, is a spatial one whose window meets one element at each position.
    """
    lhs, rhs = _operand(hlo, made, 0), _operand(hlo, made, 1)
    out = arrays_of(made.shape)[0]
    labels = _LABELS.search(made.attributes)
    if labels is None:
        raise ValueError(f"a convolution without dim_labels: {made.attributes[:80]!r}")
    ins, kernel, outs = labels.groups()
    spatial = [d for d in outs if d.isdigit()]
    window = _window(made.attributes, len(spatial))
    batch, columns, taps = 1, 1, 1.0
    for d in spatial:
        base, size = lhs.sizes[ins.index(d)], rhs.sizes[kernel.index(d)]
        outs_of = out.sizes[outs.index(d)]
        met = _taps(base, size, outs_of, window[int(d)])
        taps *= met
        if size > 1 and met == 1.0:  # each position meets one element of the kernel
            columns *= outs_of if base == 1 else 1
            batch *= outs_of if base == outs_of else 1
    n, k = out.sizes[outs.index("f")] * columns, rhs.sizes[kernel.index("i")] * taps
    groups = re.search(r"batch_group_count=(\d+)", made.attributes)
    k /= int(groups.group(1)) if groups else 1
    wide = max(lhs, rhs, key=lambda array: array.bits)
    m = out.elements // max(1, n * batch)
    return Product(batch, m, n, k, wide.bits, wide.dtype)


def _window(attributes: str, axes: int) -> list[tuple[int, int, int, int]]:
    """(stride, low padding, dilation of the input, of the kernel) of each axis."""
    if not axes:
        return []
    found = _WINDOW.search(attributes)
    fields = dict(f.split("=") for f in found.group(1).split()) if found else {}
    per_axis = lambda name, of: fields.get(name, "x".join([of] * axes)).split("x")
    strides, inputs, kernels = (
        per_axis(name, "1") for name in ("stride", "lhs_dilate", "rhs_dilate")
    )
    low = [pad.split("_")[0] for pad in per_axis("pad", "0_0")]
    rows = zip(strides, low, inputs, kernels, strict=True)
    return [(int(s), int(p), int(i), int(k)) for s, p, i, k in rows]


def _taps(base: int, size: int, outs: int, window: tuple[int, int, int, int]) -> float:
    """How many taps of an axis meet a true element, on the mean of its positions."""
    stride, low, dilated, spread = window
    if outs * size > _MOST_TAPS:
        return float(size)
    at = np.arange(outs)[:, None] * stride - low + np.arange(size)[None, :] * spread
    inside = (at >= 0) & (at <= (base - 1) * dilated) & (at % dilated == 0)
    return float(inside.sum()) / max(1, outs)


def _library_call(hlo: Hlo, made: Instruction) -> Iterator[Product]:
    """Products of a call to cuBLAS or cuDNN, by the name of what is called."""
    target = call_target(made)
    if target.startswith("__cublas$"):
        yield _cublas(hlo, made)
    elif target.startswith("__cudnn$conv") and _LABELS.search(made.attributes):
        yield _convolution(hlo, made)
    elif attention := attention_of(hlo, made):
        yield from attention.products()


def call_target(made: Instruction) -> str:
    """The name of what a custom call runs."""
    found = re.search(r'custom_call_target="([^"]*)"', made.attributes)
    return found.group(1) if found else ""


def called_targets(hlo: Hlo, made: Instruction) -> list[str]:
    """Of an instruction, or of those in its fusion."""
    of = inside(hlo, made) if made.opcode == "fusion" else (made,)
    return [call_target(one) for one in of if one.opcode == "custom-call"]


def _cublas(hlo: Hlo, made: Instruction) -> Product:
    def axes(name: str) -> list[int]:
        found = re.search(rf'"{name}":\[([^\]]*)\]', made.attributes)
        return [int(i) for i in re.findall(r"\d+", found.group(1))] if found else []

    summed, batch = axes("lhs_contracting_dimensions"), axes("lhs_batch_dimensions")
    return _by_axes(hlo, made, summed, batch)


def attention_of(hlo: Hlo, made: Instruction) -> LibraryAttention | None:
    """The pass of cuDNN's attention that an instruction calls; None of any other."""
    target = call_target(made)
    if not target.startswith("__cudnn$fmha"):
        return None
    # [batch, length, heads, width], as `jax.nn` hands them to cuDNN
    q, kv = _operand(hlo, made, 0), _operand(hlo, made, 1)
    batch, queries, heads, width = q.sizes
    causal, backward = "CAUSAL" in made.attributes, "Backward" in target
    about = q.bits, q.dtype, causal, "Bias" in target, backward
    return LibraryAttention(batch * heads, queries, kv.sizes[1], width, *about)
