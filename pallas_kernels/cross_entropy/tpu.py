"""Cross entropy of a linear layer's logits on a TPU.

Tokens lie along the lanes: a block of logits is [columns, tokens], so that what is
known of a token (its label, largest logit, sum) is a row, reduced over sublanes and
broadcast for free. A block has all features.

Forward: for each block of tokens all blocks of the vocabulary in sequence, with a
running maximum and sum. Backward: one pass in that order for the gradient of x, which
is summed in float32 on the chip; and one for those of kernel and bias, for each block
of the vocabulary all blocks of tokens in sequence.

Memory traffic in elements, with X = tokens * features, W = features * vocabulary:
forward X + W (tokens / block_tokens); for x 2 X + W (tokens / block_tokens); for the
kernel 2 W + X (vocabulary / block_vocabulary).

Limits: each backward pass recomputes its blocks' logits, so there are five products
where plain jax in blocks needs four, and three where only one of the gradients is
wanted. Softmax gradients that round to zero are multiplied all the same. Nothing was
timed on a device.

Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (ICLR
2025), section 4; Milakov and Gimelshein, "Online normalizer calculation for softmax"
(2018).
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import chips
from pallas_kernels.arrays import LANES, check_dtypes, dot, like
from pallas_kernels.cross_entropy.inputs import (
    LOWEST,
    TINY,
    LossOptions,
    logits_gradient,
    only,
)
from pallas_kernels.lowering import for_chip

DTYPES = ("float32", "bfloat16")
# Blocks take at most the first number of bytes of a core's memory; if the core has less
# than the second (v2 to v4), seven eighths of it. The compiler may use the second, or
# all of a smaller memory.
BLOCKS_BYTES, VMEM_BYTES = 40 * 2**20, 60 * 2**20


class TpuLoss(NamedTuple):
    """The static part. `axis` is the kernel's axis of the vocabulary."""

    axis: int
    softcap: float | None
    precision: Any
    tokens: int
    vocabulary: int
    block_tokens: int
    block_vocabulary: int
    vmem: int  # bytes of a core's memory that the blocks want

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks of tokens, and of the vocabulary."""
        tokens = pl.cdiv(self.tokens, self.block_tokens)
        return tokens, pl.cdiv(self.vocabulary, self.block_vocabulary)


def forward(
    x, kernel, bias, labels, options: LossOptions, *, sums: bool = False
) -> dict[str, Any]:
    """What is known of each token: see the package."""
    kernel, axis = _as_it_lies(kernel, options.vocab_axis)
    # Pallas fetches the next block of x, and of the kernel, while it computes on one.
    costs = 2 * x.dtype.itemsize, 2 * kernel.dtype.itemsize
    case = _case(x, kernel, axis, costs, options)
    ins = {"x": x, "kernel": kernel, "bias": bias, "labels": labels}
    names = ["top", "log_total", "hit"] + ["total"] * sums
    row = like(x, (1, case.tokens), jnp.float32)
    outs = _call(_forward_body, case, ins, dict.fromkeys(names, row), over_tokens=False)
    return {name: out[0] for name, out in outs.items()}


def backward(
    arrays,
    rows: dict[str, Any],
    g: dict[str, Any],
    unit,
    options: LossOptions,
    *,
    wanted: frozenset[str],
) -> dict[str, Any]:
    """The gradients of those arrays that are in `wanted`: see the package."""
    x, kernel, bias, labels = arrays
    shape = kernel.shape
    kernel, axis = _as_it_lies(kernel, options.vocab_axis)
    ins = {"x": x, "kernel": kernel, "bias": bias, "labels": labels, **rows}
    ins |= {f"g_{name}": t for name, t in g.items()}
    ins["unit"] = unit.astype(jnp.float32).reshape(1)
    narrow, wide = x.dtype.itemsize, kernel.dtype.itemsize
    grads = {}
    if "x" in wanted:
        # x and its gradient twice, and a sum in float32
        case = _case(x, kernel, axis, (4 * narrow + 4, 2 * wide), options)
        outs = {"x": like(x, x.shape, x.dtype)}
        grads |= _call(_dx_body, case, ins, outs, over_tokens=False)
    if wanted & {"kernel", "bias"}:
        costs = 2 * narrow, 4 * wide + 4
        case = _case(x, kernel, axis, costs, options, tokens_first=False)
        bias_sum = (1, case.vocabulary), jnp.float32
        outs = {"kernel": (kernel.shape, kernel.dtype), "bias": bias_sum}
        outs = {name: like(x, *outs[name]) for name in outs if name in wanted}
        grads |= _call(_dkernel_body, case, ins, outs, over_tokens=True)
    if "kernel" in wanted and axis != options.vocab_axis:
        grads["kernel"] = grads["kernel"].T.reshape(shape)
    if "bias" in wanted:
        grads["bias"] = grads["bias"][0].astype(bias.dtype)
    return grads


# -- arrays and blocks


def _as_it_lies(kernel, axis: int):
    """(the kernel, its axis of the vocabulary) as XLA lays the kernel out."""
    # XLA chooses the layout of least padding: a vocabulary that does not fill its lanes
    # is the major axis in memory. Another layout would cost a copy.
    if axis == 1 and kernel.shape[1] % LANES:
        return kernel.T, 0
    return kernel, axis


def _check(x, kernel, options: LossOptions) -> None:
    """Raises NotImplementedError for what is not supported."""
    check_dtypes(DTYPES, x, kernel)
    if x.shape[1] % LANES or not x.shape[0]:
        raise NotImplementedError(
            f"some tokens, and features in multiples of {LANES}, not {x.shape}"
        )
    blocks = options.block_tokens, options.block_vocabulary
    if any(block and block % LANES for block in blocks):
        raise NotImplementedError(f"blocks in multiples of {LANES}, not {blocks}")


def _case(
    x, kernel, axis: int, costs, options: LossOptions, tokens_first: bool = True
) -> TpuLoss:
    """The static part, with the largest blocks that there is room for."""
    # Args: costs: bytes a feature, of a token in a block and of a column. tokens_first:
    # whether tokens get the larger block, not the vocabulary: that one stays on the
    # chip while blocks of the other stream past it.
    given = options.block_tokens, options.block_vocabulary
    (tokens, features), vocabulary = x.shape, kernel.shape[axis]
    _check(x, kernel, options)
    cast = x.dtype.itemsize * (kernel.dtype != x.dtype)

    def used(block):
        logits = 6 * 4 * block[0] * block[1]
        a_feature = block[0] * costs[0] + block[1] * (costs[1] + cast)
        return features * a_feature + logits

    pairs = list(itertools.product((512, 256, LANES), repeat=2))
    pairs = pairs if tokens_first else [pair[::-1] for pair in pairs]
    room = BLOCKS_BYTES if _vmem() == VMEM_BYTES else _vmem() * 7 // 8
    block = next((pair for pair in pairs if used(pair) <= room), None)
    if block is None:
        least, most = used(pairs[-1]) / chips.MIB, room / chips.MIB
        raise NotImplementedError(
            f"fewer features than {features}: the least blocks take {least:.1f} MiB of "
            f"the chip's memory, of {most:.1f}"
        )
    lengths = tokens, vocabulary
    whole = [pl.cdiv(length, LANES) * LANES for length in lengths]
    chosen = [want or size for want, size in zip(given, block, strict=True)]
    block = min(chosen[0], whole[0]), min(chosen[1], whole[1])
    static = axis, options.softcap, options.precision
    return TpuLoss(*static, *lengths, *block, used(block) * 8 // 7)


def _vmem() -> int:
    """Bytes that the compiler may use of a core's memory, on the chip traced for."""
    return min(chips.vmem_in_context() or VMEM_BYTES, VMEM_BYTES)


ROWS = {"labels", "top", "log_total", "hit", "total"}
ROWS |= {f"g_{name}" for name in ROWS}


def _call(
    body: Callable, case: TpuLoss, ins, outs, *, over_tokens: bool
) -> dict[str, Any]:
    """The kernel over all pairs of blocks.

    `over_tokens`: whether blocks of tokens are the inner loop. Bodies find references
    by their arrays' names, and sum over the inner loop on the chip.
    """
    ins = {k: t for k, t in sorted(ins.items()) if t is not None}
    name = "linear_cross_entropy"
    ins |= for_chip({"x": ins["x"]}, chips.Needs(name, "tpu", vmem=case.vmem))
    ins |= {k: t[None] for k, t in ins.items() if k in ROWS or k == "bias"}
    outs = dict(sorted(outs.items()))
    order = (lambda j, i: (i, j)) if over_tokens else (lambda i, j: (i, j))
    grid = case.blocks[::-1] if over_tokens else case.blocks

    def spec(name, array):
        shape, place = _block_of(name, array.shape, case)
        space = pltpu.SMEM if name == "unit" else pltpu.VMEM
        return pl.BlockSpec(shape, lambda a, b: place(*order(a, b)), memory_space=space)

    sums = {
        f"{name}_sum": pltpu.VMEM(_block_of(name, t.shape, case)[0], jnp.float32)
        for name, t in outs.items()
        if name in ("x", "kernel", "bias")
    }
    return pl.pallas_call(
        functools.partial(body, case),
        grid=grid,
        in_specs=({name: spec(name, t) for name, t in ins.items()},),
        out_specs={name: spec(name, t) for name, t in outs.items()},
        out_shape=outs,
        scratch_shapes=(sums,),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_vmem()
        ),
        name=f"jaxmem_cross_entropy{body.__name__.removesuffix('_body')}",
    )(ins)


def _block_of(name: str, shape, case: TpuLoss):
    """(a block's shape, its place by the blocks' numbers) of an array."""
    zero = np.int32(0)  # a plain 0 would be an int64 where these are switched on
    if name == "unit":
        return shape, lambda i, j: (zero,)
    if name == "x":
        return (case.block_tokens, shape[1]), lambda i, j: (i, zero)
    if name in ROWS:
        return (1, case.block_tokens), lambda i, j: (zero, i)
    if name == "bias":
        return (1, case.block_vocabulary), lambda i, j: (zero, j)
    if case.axis:
        return (shape[0], case.block_vocabulary), lambda i, j: (zero, j)
    return (case.block_vocabulary, shape[1]), lambda i, j: (j, zero)


# -- what is computed of a block


def _dot(case: TpuLoss, a, b, axes: tuple[int, int]):
    return dot(a, b, axes, case.precision if a.dtype == jnp.float32 else None)


def _inside(shape, axis: int, first, length: int):
    """Where an axis of a block is not past the array's end."""
    return lax.broadcasted_iota(jnp.int32, shape, axis) + first < length


def _columns(case: TpuLoss, ins, first):
    """A block of the kernel in the dtype of x, zero past the vocabulary's end."""
    w = ins["kernel"][...].astype(ins["x"].dtype)
    if case.vocabulary % case.block_vocabulary == 0:
        return w
    return jnp.where(_inside(w.shape, case.axis, first, case.vocabulary), w, 0)


def _logits(case: TpuLoss, ins, w):
    """[columns, tokens]."""
    raw = _dot(case, w, ins["x"][...], (1 - case.axis, 1))
    if "bias" in ins:
        raw = raw + ins["bias"][...].astype(jnp.float32).reshape(-1, 1)
    if case.softcap is None:
        return raw
    return np.float32(case.softcap) * jnp.tanh(raw / np.float32(case.softcap))


def _column_numbers(case: TpuLoss, logits, first):
    """(the number of each logit's column, where it is one or None: everywhere)."""
    column = lax.broadcasted_iota(jnp.int32, logits.shape, 0) + first
    if case.vocabulary % case.block_vocabulary == 0:
        return column, None
    return column, column < case.vocabulary


def _forward_body(case: TpuLoss, ins, outs, sums) -> None:
    del sums  # the outputs themselves hold the running sums
    block = pl.program_id(1)

    @pl.when(block == 0)
    def start():
        for name, ref in outs.items():
            ref[...] = jnp.full(ref.shape, LOWEST if name == "top" else 0, jnp.float32)

    first = block * case.block_vocabulary
    logits = _logits(case, ins, ins["kernel"][...].astype(ins["x"].dtype))
    column, inside = _column_numbers(case, logits, first)
    here = column == ins["labels"][...]
    here = here if inside is None else here & inside
    masked = only(inside, logits, -np.inf)
    add = lambda t: jnp.sum(t, axis=0, keepdims=True)
    before = outs["top"][...]
    top = jnp.maximum(before, jnp.max(masked, axis=0, keepdims=True))
    outs["top"][...] = top
    total = outs["log_total"][...] * jnp.exp(before - top) + add(jnp.exp(masked - top))
    outs["log_total"][...] = total
    outs["hit"][...] += add(jnp.where(here, logits, np.float32(0)))
    if "total" in outs:
        outs["total"][...] += add(only(inside, logits, 0))

    @pl.when(block == case.blocks[1] - 1)
    def end():
        # The floor is for a part of the vocabulary that is -inf alone.
        outs["log_total"][...] = jnp.log(jnp.maximum(outs["log_total"][...], TINY))


def _logits_gradient(case: TpuLoss, ins, w, first):
    """The cotangent of a block of logits in units, zero past the vocabulary's end."""
    logits = _logits(case, ins, w)
    column, inside = _column_numbers(case, logits, first)
    here = column == ins["labels"][...]
    row = lambda name: ins[name][...] if name in ins else None
    return only(inside, logits_gradient(case.softcap, logits, here, row), 0)


def _add_up(block, count: int, unit, sums, outs, parts) -> None:
    """Sums over the inner loop; its last step writes them, rounded once."""
    for name, part in parts.items():
        total, out = sums[f"{name}_sum"], outs[name]

        @pl.when(block == 0)
        def start(total=total):
            total[...] = jnp.zeros(total.shape, jnp.float32)

        total[...] += part

        @pl.when(block == count - 1)
        def end(total=total, out=out):
            out[...] = (unit * total[...]).astype(out.dtype)


def _dx_body(case: TpuLoss, ins, outs, sums) -> None:
    block = pl.program_id(1)
    first = block * case.block_vocabulary
    w = _columns(case, ins, first)
    d = _logits_gradient(case, ins, w, first).astype(w.dtype)
    parts = {"x": _dot(case, d, w, (0, case.axis))}
    _add_up(block, case.blocks[1], ins["unit"][0], sums, outs, parts)


def _dkernel_body(case: TpuLoss, ins, outs, sums) -> None:
    block = pl.program_id(1)
    w = ins["kernel"][...].astype(ins["x"].dtype)
    d = _logits_gradient(case, ins, w, pl.program_id(0) * case.block_vocabulary)
    x = ins["x"][...]
    if case.tokens % case.block_tokens:
        first = block * case.block_tokens
        d = jnp.where(_inside(d.shape, 1, first, case.tokens), d, np.float32(0))
        x = jnp.where(_inside(x.shape, 0, first, case.tokens), x, 0)
    parts = {}
    if "bias" in outs:
        parts["bias"] = jnp.sum(d, axis=1, keepdims=True).reshape(1, -1)
    if "kernel" in outs:
        d = d.astype(x.dtype)
        axis = case.axis
        parts["kernel"] = _dot(case, x, d, (0, 1)) if axis else _dot(case, d, x, (1, 0))
    _add_up(block, case.blocks[0], ins["unit"][0], sums, outs, parts)
