"""Cross entropy of a linear layer's logits on a TPU: no logit leaves the chip.

Tokens lie along the lanes: a block of logits is [columns, tokens], so that what is
known of a token (its label, largest logit, sum) is a row, reduced over sublanes and
broadcast for free. A block has all features.

Forward: for each block of tokens all blocks of the vocabulary in sequence, with a
running maximum and sum. Backward: one pass in that order for the gradient of x, which
is added up in float32 on the chip; and one for that of the kernel (and the bias), for
each block of the vocabulary all blocks of tokens in sequence. Each makes its blocks'
logits again: five products where plain jax in blocks takes four, and three where only
one of the gradients is wanted.

Through memory, in elements, with X = tokens * features, W = features * vocabulary:
forward X + W (tokens / block_tokens); for x 2 X + W (tokens / block_tokens); for the
kernel 2 W + X (vocabulary / block_vocabulary).

Not optimal: the logits of the backward pass are made twice; a softmax gradient below
rounding is multiplied all the same. Nothing was timed on a device.

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
from pallas_kernels._cross_entropy import LOWEST, TINY, dot, logits_gradient, only
from pallas_kernels._lowering import for_chip
from pallas_kernels._outputs import like

LANES = 128
DTYPES = (jnp.float32, jnp.bfloat16)
# Blocks take at most the first figure of a core's memory, and seven eighths of it where
# there is less than the second (v2 to v4); the compiler may use the second, or all.
BLOCKS_BYTES, VMEM_BYTES = 40 * 2**20, 60 * 2**20


class How(NamedTuple):
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
    x,
    kernel,
    bias,
    labels,
    *,
    vocab_axis: int = 1,
    softcap: float | None = None,
    sums: bool = False,
    precision=None,
    block_tokens: int | None = None,
    block_vocabulary: int | None = None,
) -> dict[str, Any]:
    """What is known of each token, float32 [tokens].

    Args:
      x: [tokens, features].
      kernel: [features, vocabulary], or with `vocab_axis=0` [vocabulary, features].
        It is cast to the dtype of x, a block at a time.
      bias: [vocabulary], or None.
      labels: int32 [tokens]; one outside of the vocabulary hits nothing.
      vocab_axis: 0 or 1.
      softcap: logits become `softcap * tanh(logits / softcap)`.
      sums: whether "total" is wanted.
      precision: of the products, where x is float32.
      block_tokens, block_vocabulary: multiples of 128.

    Returns:
      "top", the largest logit; "log_total", the logarithm of the sum of
      `exp(logits - top)`; "hit", the label's logit, or 0; with `sums` "total", the sum
      of all logits.
    """
    kernel, axis = _as_it_lies(kernel, vocab_axis)
    # x twice, as it is fetched ahead; so the kernel
    costs = 2 * x.dtype.itemsize, 2 * kernel.dtype.itemsize
    sizes = _sizes(x, kernel, axis, costs, (block_tokens, block_vocabulary))
    how = How(axis, softcap, precision, *sizes)
    ins = {"x": x, "kernel": kernel, "bias": bias, "labels": labels}
    names = ["top", "log_total", "hit"] + ["total"] * sums
    row = like(x, (1, how.tokens), jnp.float32)
    outs = _call(_forward_body, how, ins, dict.fromkeys(names, row), over_tokens=False)
    return {name: out[0] for name, out in outs.items()}


def backward(
    x,
    kernel,
    bias,
    labels,
    rows: dict[str, Any],
    g: dict[str, Any],
    unit,
    *,
    wanted: frozenset[str],
    vocab_axis: int = 1,
    softcap: float | None = None,
    precision=None,
    block_tokens: int | None = None,
    block_vocabulary: int | None = None,
) -> dict[str, Any]:
    """The gradients of those of "x", "kernel" and "bias" that are in `wanted`.

    Args:
      x, kernel, bias, labels, vocab_axis, softcap, precision: as for `forward`.
      rows: "top" and "log_total".
      g: cotangents of "log_total", "hit" and "total", which may be None.
      unit: float32 scalar, by which the gradients are multiplied before they are
        rounded to the dtypes of their arrays.
      wanted: the names.
      block_tokens, block_vocabulary: of both passes, multiples of 128.
    """
    shape = kernel.shape
    kernel, axis = _as_it_lies(kernel, vocab_axis)
    ins = {"x": x, "kernel": kernel, "bias": bias, "labels": labels, **rows}
    ins |= {f"g_{name}": t for name, t in g.items()}
    ins["unit"] = unit.astype(jnp.float32).reshape(1)
    narrow, wide = x.dtype.itemsize, kernel.dtype.itemsize
    given = block_tokens, block_vocabulary
    made = {}
    if "x" in wanted:
        # x and its gradient twice, and a sum in float32
        sizes = _sizes(x, kernel, axis, (4 * narrow + 4, 2 * wide), given)
        how = How(axis, softcap, precision, *sizes)
        outs = {"x": like(x, x.shape, x.dtype)}
        made |= _call(_dx_body, how, ins, outs, over_tokens=False)
    if wanted & {"kernel", "bias"}:
        costs = 2 * narrow, 4 * wide + 4
        sizes = _sizes(x, kernel, axis, costs, given, tokens_first=False)
        how = How(axis, softcap, precision, *sizes)
        bias_sum = (1, how.vocabulary), jnp.float32
        outs = {"kernel": (kernel.shape, kernel.dtype), "bias": bias_sum}
        outs = {name: like(x, *outs[name]) for name in wanted & set(outs)}
        made |= _call(_dkernel_body, how, ins, outs, over_tokens=True)
    if "kernel" in wanted and axis != vocab_axis:
        made["kernel"] = made["kernel"].T.reshape(shape)
    if "bias" in wanted:
        made["bias"] = made["bias"][0].astype(bias.dtype)
    return made


# -- arrays and blocks


def _as_it_lies(kernel, axis: int):
    """A vocabulary that does not fill its lanes is the major axis in memory.

    XLA chooses the layout of least padding; to ask for the other one is a copy.
    """
    if axis == 1 and kernel.shape[1] % LANES:
        return kernel.T, 0
    return kernel, axis


def _sizes(x, kernel, axis: int, costs, given, tokens_first: bool = True):
    """(tokens, vocabulary, a block of each, the memory that these want).

    Args:
      costs: bytes a feature, of a token in a block and of a column.
      given: the blocks that were asked for, or None.
      tokens_first: which is to be as large as fits: the one that stays on the chip
        while blocks of the other stream past it.
    """
    (tokens, features), vocabulary = x.shape, kernel.shape[axis]
    if {x.dtype, kernel.dtype} - set(map(jnp.dtype, DTYPES)):
        raise NotImplementedError(
            f"float32 and bfloat16, not {x.dtype} and {kernel.dtype}"
        )
    if features % LANES or not tokens:
        raise NotImplementedError(
            f"some tokens, and features in multiples of {LANES}, not {x.shape}"
        )
    if any(block and block % LANES for block in given):
        raise NotImplementedError(f"blocks in multiples of {LANES}, not {given}")
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
    return *lengths, *block, used(block) * 8 // 7


def _vmem() -> int:
    """What the compiler may use of a core's memory, on the chip that is traced for."""
    return min(chips.vmem_in_context() or VMEM_BYTES, VMEM_BYTES)


ROWS = {"labels", "top", "log_total", "hit", "total"}
ROWS |= {f"g_{name}" for name in ROWS}


def _call(body: Callable, how: How, ins, outs, *, over_tokens: bool) -> dict[str, Any]:
    """The kernel over all pairs of blocks.

    `over_tokens`: whether blocks of tokens are the inner loop. References are found by
    their arrays' names, and what is added up over the inner loop is on the chip.
    """
    ins = {k: t for k, t in sorted(ins.items()) if t is not None}
    name = "linear_cross_entropy"
    ins |= for_chip({"x": ins["x"]}, chips.Needs(name, "tpu", vmem=how.vmem))
    ins |= {k: t[None] for k, t in ins.items() if k in ROWS or k == "bias"}
    outs = dict(sorted(outs.items()))
    order = (lambda j, i: (i, j)) if over_tokens else (lambda i, j: (i, j))
    grid = how.blocks[::-1] if over_tokens else how.blocks

    def spec(name, array):
        shape, place = _block_of(name, array.shape, how)
        space = pltpu.SMEM if name == "unit" else pltpu.VMEM
        return pl.BlockSpec(shape, lambda a, b: place(*order(a, b)), memory_space=space)

    sums = {
        f"{name}_sum": pltpu.VMEM(_block_of(name, t.shape, how)[0], jnp.float32)
        for name, t in outs.items()
        if name in ("x", "kernel", "bias")
    }
    return pl.pallas_call(
        functools.partial(body, how),
        grid=grid,
        in_specs=({name: spec(name, t) for name, t in ins.items()},),
        out_specs={name: spec(name, t) for name, t in outs.items()},
        out_shape=outs,
        scratch_shapes=(sums,),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=_vmem(),
        ),
        name=f"jaxmem_cross_entropy{body.__name__.removesuffix('_body')}",
    )(ins)


def _block_of(name: str, shape, how: How):
    """(a block's shape, its place by the blocks' numbers) of an array."""
    zero = np.int32(0)  # a plain 0 would be an int64 where these are switched on
    if name == "unit":
        return shape, lambda i, j: (zero,)
    if name == "x":
        return (how.block_tokens, shape[1]), lambda i, j: (i, zero)
    if name in ROWS:
        return (1, how.block_tokens), lambda i, j: (zero, i)
    if name == "bias":
        return (1, how.block_vocabulary), lambda i, j: (zero, j)
    if how.axis:
        return (shape[0], how.block_vocabulary), lambda i, j: (zero, j)
    return (how.block_vocabulary, shape[1]), lambda i, j: (j, zero)


# -- what is computed of a block


def _dot(how: How, a, b, axes: tuple[int, int]):
    return dot(a, b, axes, how.precision if a.dtype == jnp.float32 else None)


def _inside(shape, axis: int, first, length: int):
    """Where an axis of a block is not past the array's end."""
    return lax.broadcasted_iota(jnp.int32, shape, axis) + first < length


def _columns(how: How, ins, first):
    """A block of the kernel in the dtype of x, zero past the vocabulary's end."""
    w = ins["kernel"][...].astype(ins["x"].dtype)
    if how.vocabulary % how.block_vocabulary == 0:
        return w
    return jnp.where(_inside(w.shape, how.axis, first, how.vocabulary), w, 0)


def _logits(how: How, ins, w):
    """[columns, tokens]."""
    raw = _dot(how, w, ins["x"][...], (1 - how.axis, 1))
    if "bias" in ins:
        raw = raw + ins["bias"][...].astype(jnp.float32).reshape(-1, 1)
    if how.softcap is None:
        return raw
    return np.float32(how.softcap) * jnp.tanh(raw / np.float32(how.softcap))


def _column_numbers(how: How, logits, first):
    """(the number of each logit's column, where it is one or None: everywhere)."""
    column = lax.broadcasted_iota(jnp.int32, logits.shape, 0) + first
    if how.vocabulary % how.block_vocabulary == 0:
        return column, None
    return column, column < how.vocabulary


def _forward_body(how: How, ins, outs, sums) -> None:
    del sums  # the rows are added up where they leave from
    block = pl.program_id(1)

    @pl.when(block == 0)
    def start():
        for name, ref in outs.items():
            ref[...] = jnp.full(ref.shape, LOWEST if name == "top" else 0, jnp.float32)

    first = block * how.block_vocabulary
    logits = _logits(how, ins, ins["kernel"][...].astype(ins["x"].dtype))
    column, inside = _column_numbers(how, logits, first)
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

    @pl.when(block == how.blocks[1] - 1)
    def end():
        # The floor is for a part of the vocabulary that is -inf alone.
        outs["log_total"][...] = jnp.log(jnp.maximum(outs["log_total"][...], TINY))


def _logits_gradient(how: How, ins, w, first):
    """The cotangent of a block of logits in units, zero past the vocabulary's end."""
    logits = _logits(how, ins, w)
    column, inside = _column_numbers(how, logits, first)
    here = column == ins["labels"][...]
    row = lambda name: ins[name][...] if name in ins else None
    return only(inside, logits_gradient(how.softcap, logits, here, row), 0)


def _add_up(block, count: int, unit, sums, outs, parts) -> None:
    """Sums over the inner loop; the last of it writes them, rounded once."""
    for name, part in parts.items():
        total, out = sums[f"{name}_sum"], outs[name]

        @pl.when(block == 0)
        def start(total=total):
            total[...] = jnp.zeros(total.shape, jnp.float32)

        total[...] += part

        @pl.when(block == count - 1)
        def end(total=total, out=out):
            out[...] = (unit * total[...]).astype(out.dtype)


def _dx_body(how: How, ins, outs, sums) -> None:
    block = pl.program_id(1)
    first = block * how.block_vocabulary
    w = _columns(how, ins, first)
    d = _logits_gradient(how, ins, w, first).astype(w.dtype)
    parts = {"x": _dot(how, d, w, (0, how.axis))}
    _add_up(block, how.blocks[1], ins["unit"][0], sums, outs, parts)


def _dkernel_body(how: How, ins, outs, sums) -> None:
    block = pl.program_id(1)
    w = ins["kernel"][...].astype(ins["x"].dtype)
    d = _logits_gradient(how, ins, w, pl.program_id(0) * how.block_vocabulary)
    x = ins["x"][...]
    if how.tokens % how.block_tokens:
        first = block * how.block_tokens
        d = jnp.where(_inside(d.shape, 1, first, how.tokens), d, np.float32(0))
        x = jnp.where(_inside(x.shape, 0, first, how.tokens), x, 0)
    parts = {}
    if "bias" in outs:
        parts["bias"] = jnp.sum(d, axis=1, keepdims=True).reshape(1, -1)
    if "kernel" in outs:
        d = d.astype(x.dtype)
        axis = how.axis
        parts["kernel"] = _dot(how, x, d, (0, 1)) if axis else _dot(how, d, x, (1, 0))
    _add_up(block, how.blocks[0], ins["unit"][0], sums, outs, parts)
