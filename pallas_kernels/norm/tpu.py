"""Norms on TPUs, with dropout and a residual sum in the same pass.

A block of whole rows lies in on-chip memory and is processed in slabs of a few rows, so
that intermediate values stay near the registers. The backward pass recomputes the
statistics from the rows it reads anyway: only the input is saved for it. It runs in
place: the gradient of the input replaces the incoming one. The gradients of scale and
bias are summed in on-chip memory over the whole grid, which is then sequential; blocks
of the forward pass are divided among the chip's cores.

Memory traffic for N rows of D elements of b bytes:

    forward   N D b * 2, with a residual 4; and 8 N where the moments are wanted
    backward  N D b * 3, with dropout and residual 5; and 4 N from the output

Limits: in a backward pass with gradients of scale or bias one TensorCore works, where
a chip has two that share a program (v4, v5p). Nothing here has been timed on a device.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _compat, hashing
from pallas_kernels.arrays import LANES, check_dtypes, float32, like
from pallas_kernels.norm import arithmetic
from pallas_kernels.norm.arithmetic import NormRules

DTYPES = ("float32", "bfloat16")
WIDEST = 16384

# Elements in a block and in a slab: with all of a backward pass's inputs and outputs
# twice in flight, a block of float32 fills 10 of the 16 MiB that a kernel may have.
_BLOCK = 2**18
_SLAB = 2**16


def _lanes(width: int) -> int:
    """The width as it lies in on-chip memory."""
    return -(-width // LANES) * LANES


def _slab_rows(width: int) -> int:
    """16 rows at least: a tile of bfloat16. A power of two, at most 128."""
    rows = 16
    while rows < LANES and 2 * rows * _lanes(width) <= _SLAB:
        rows *= 2
    return rows


def block_rows(rows: int, width: int) -> int:
    """Rows in a block: whole slabs, and no more than there are."""
    slab = _slab_rows(width)
    most = max(1, _BLOCK // (slab * _lanes(width)))
    return slab * min(most, -(-rows // slab))


class _RowBlocks:
    """How N rows are divided: into blocks for the grid, and slabs within a block."""

    def __init__(self, shape: tuple[int, int], block: int | None):
        self.rows, self.width = shape
        self.slab = _slab_rows(self.width)
        self.block = block_rows(*shape) if block is None else block
        if self.block % self.slab:
            raise NotImplementedError(f"blocks of a multiple of {self.slab} rows")
        self.count = -(-self.rows // self.block)
        self.stat_shape = (-(-self.block // LANES), LANES)

    def loop(self, body) -> None:
        """`body` for the first row of each slab, within this block."""
        slabs = np.int32(self.block // self.slab)
        step = lambda i, _: body(pl.multiple_of(i * np.int32(self.slab), self.slab))
        jax.lax.fori_loop(np.int32(0), slabs, step, None)

    def position(self, first):
        """Rows of the slab in the whole array, int32, as a column."""
        start = pl.program_id(0) * np.int32(self.block) + first
        return start + _iota((self.slab, 1), 0)

    def pack(self, stats):
        """[N] as blocks of lanes."""
        padded = jnp.pad(stats, (0, self.count * self.block - self.rows))
        blocks = padded.reshape(self.count, self.block)
        room = self.stat_shape[0] * LANES - self.block
        return jnp.pad(blocks, ((0, 0), (0, room))).reshape(-1, *self.stat_shape)

    def unpack(self, stats):
        """The inverse of `pack`."""
        return stats.reshape(self.count, -1)[:, : self.block].reshape(-1)[: self.rows]

    def _place(self, first):
        """(which row of lanes has the slab's numbers, and which lane is whose)."""
        row = jax.lax.div(first, np.int32(LANES))
        lane = jax.lax.rem(first, np.int32(LANES)) + _iota((self.slab, LANES), 0)
        return pl.ds(row, 1), lane == _iota((self.slab, LANES), 1)

    def put(self, ref, first, column) -> None:
        """Adds a slab's numbers, a column, to a block of lanes."""
        row, here = self._place(first)
        ref[0, row, :] += jnp.sum(jnp.where(here, column, 0.0), axis=0, keepdims=True)

    def take(self, ref, first):
        """A slab's numbers, as a column."""
        row, here = self._place(first)
        return jnp.sum(jnp.where(here, ref[0, row, :], 0.0), axis=1, keepdims=True)

    def spec(self, kind: str) -> pl.BlockSpec:
        zero = np.int32(0)
        if kind == "rows":
            return pl.BlockSpec((self.block, self.width), lambda i: (i, zero))
        if kind == "stats":
            return pl.BlockSpec((1, *self.stat_shape), lambda i: (i, zero, zero))
        if kind == "vector":
            return pl.BlockSpec((1, self.width), lambda i: (zero, zero))
        return pl.BlockSpec((1, 2), lambda i: (zero, zero), memory_space=pltpu.SMEM)


def _iota(shape, axis: int):
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _mean_of(x):
    return jnp.sum(x, axis=1, keepdims=True) / np.float32(x.shape[1])


def _dropped(rules: NormRules, seed, position, x):
    """Dropout of a slab, whose rows are at `position`."""
    words = seed[0, 0], seed[0, 1]
    column = hashing.column_word(words, _iota((1, x.shape[1]), 1).astype(jnp.uint32))
    keep = arithmetic.keep(rules, words, position.astype(jnp.uint32), column)
    return arithmetic.dropped(rules, keep, x)


# Arrays that are not rows [N, D].
KINDS = {"seed": "seed", "mean": "stats", "var": "stats"}
KINDS |= dict.fromkeys(("scale", "bias", "shift", "inverse"), "vector")


def _laid_out(arrays: dict[str, Any]) -> dict[str, Any]:
    """Vectors as rows of float32, and the seed [1, 2]."""
    # With two axes `vmap`, which adds one in front, leaves the tiles as they are.
    shapes = {"seed": (1, 2), "vector": (1, -1)}
    out = {k: x for k, x in arrays.items() if x is not None}
    for name in sorted(out.keys() & KINDS.keys(), reverse=True):
        x = out[name] if name == "seed" else float32(out[name])
        out[name] = x.reshape(shapes[KINDS[name]])
    return out


def _whole(refs, *names):
    return (refs[n][...] if n in refs else None for n in names)


def _call(
    blocks: _RowBlocks, body, name: str, ins: dict[str, Any], outs: dict[str, Any], over
):
    """The kernel over all blocks; `over`: which output replaces which input."""
    # Blocks are divided among a chip's cores, unless they add to one sum.
    are_apart = not {"scale", "bias"} & set(outs)
    ins, outs = dict(sorted(ins.items())), dict(sorted(outs.items()))
    spec = lambda names: {k: blocks.spec(KINDS.get(k, "rows")) for k in names}
    places = {list(ins).index(i): list(outs).index(o) for o, i in over.items()}
    places = _compat.aliases(places, ragged=blocks.rows % blocks.block > 0)
    return pl.pallas_call(
        body,
        grid=(blocks.count,),
        in_specs=(spec(ins),),
        out_specs=spec(outs),
        out_shape=outs,
        input_output_aliases=places,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel" if are_apart else "arbitrary",)
        ),
        name=name,
    )(ins)


def _check(x, *others) -> None:
    check_dtypes(DTYPES, x, *others)
    if x.shape[1] > WIDEST:
        raise NotImplementedError(f"rows of at most {WIDEST} elements")
    if x.size == 0:
        raise NotImplementedError("arrays that are not empty")


def _forward_body(rules: NormRules, blocks: _RowBlocks, ins, outs) -> None:
    scale, bias = _whole(ins, "scale", "bias")
    for name in {"mean", "var"} & set(outs):
        outs[name][...] = jnp.zeros(outs[name].shape, jnp.float32)

    def slab(first):
        rows = pl.ds(first, blocks.slab)
        x = float32(ins["x"][rows, :])
        if "total" in outs:
            if rules.rate:
                x = _dropped(rules, ins["seed"], blocks.position(first), x)
                x = float32(x.astype(ins["x"].dtype))
            total = (float32(ins["residual"][rows, :]) + x).astype(outs["total"].dtype)
            outs["total"][rows, :] = total
            x = float32(total)
        off, mean, var = arithmetic.moments(rules, x, _mean_of)
        y = arithmetic.affine(off, arithmetic.rstd(rules, var), scale, bias)
        outs["y"][rows, :] = y.astype(outs["y"].dtype)
        for name, stat in (("mean", mean), ("var", var)):
            if name in outs:
                blocks.put(outs[name], first, stat)

    blocks.loop(slab)


def forward(
    arrays: dict[str, Any], *, rules: NormRules, dtype, stats: bool = False,
    block: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The norm of "x", or of "residual" + dropout("x"), over the last axis.

    Args:
      arrays: by name; those that are not there may be None or missing.
        "x": [N, D], float32 or bfloat16.
        "residual": [N, D], of its own dtype.
        "seed": uint32[2], if there is dropout.
        "scale", "bias": [D].
      rules: the formula.
      dtype: of the output.
      stats: whether the moments are wanted.
      block: rows in a block; None for a size that fits well.

    Returns:
      "y" [N, D]; "total", the sum in the residual's dtype, if there is a residual;
      "var" [N] and, if centred, "mean" [N], float32, if they are wanted.

    Raises:
      NotImplementedError: another dtype, rows too wide, or an empty array.
    """
    x, residual = arrays["x"], arrays.get("residual")
    _check(x, residual, jax.ShapeDtypeStruct((), dtype))
    blocks = _RowBlocks(x.shape, block)
    ins = _laid_out(arrays)
    outs = {"y": like(x, x.shape, dtype)}
    if residual is not None:
        outs["total"] = like(x, x.shape, residual.dtype)
    if stats:
        shape = (blocks.count, *blocks.stat_shape)
        names = ("mean", "var")[not rules.centred :]
        outs |= {name: like(x, shape, jnp.float32) for name in names}
    body = functools.partial(_forward_body, rules, blocks)
    got = _call(blocks, body, "norm_forward", ins, outs, {})
    return {
        k: blocks.unpack(v) if KINDS.get(k) == "stats" else v for k, v in got.items()
    }


def _backward_body(rules: NormRules, blocks: _RowBlocks, ins, outs) -> None:
    scale, shift, inverse = _whole(ins, "scale", "shift", "inverse")
    sums = [name for name in ("scale", "bias") if name in outs]

    @pl.when(pl.program_id(0) == 0)
    def _():
        for name in sums:
            outs[name][...] = jnp.zeros((1, blocks.width), jnp.float32)

    def slab(first):
        rows = pl.ds(first, blocks.slab)
        g, saved = float32(ins["g"][rows, :]), float32(ins["saved"][rows, :])
        var = blocks.take(ins["var"], first) if "var" in ins else None
        output = var, shift, inverse
        xhat, var = arithmetic.normalised(rules, saved, output, _mean_of)
        shares = {"scale": g * xhat, "bias": g}
        for name in sums:
            share = shares[name]
            if blocks.rows % blocks.block:
                share = jnp.where(blocks.position(first) < blocks.rows, share, 0.0)
            outs[name][...] += jnp.sum(share, axis=0, keepdims=True)
        if not {"residual", "x"} & set(outs):
            return
        u = g if scale is None else g * scale
        d = arithmetic.input_gradient(rules, u, xhat, var, _mean_of)
        if "g_total" in ins:
            d = d + float32(ins["g_total"][rows, :])
        if "residual" in outs:
            outs["residual"][rows, :] = d.astype(outs["residual"].dtype)
        if "x" in outs:
            if rules.rate:
                d = _dropped(rules, ins["seed"], blocks.position(first), d)
            outs["x"][rows, :] = d.astype(outs["x"].dtype)

    blocks.loop(slab)


def backward(
    arrays: dict[str, Any], output=None, *, rules: NormRules, outs: dict[str, Any],
    block: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The gradients of a norm; the input's is written over the incoming one.

    Args:
      arrays: by name; those that are not there may be None or missing.
        "g": [N, D], the gradient of the output.
        "g_total": [N, D], that of the sum.
        "saved": [N, D], what was normalised; with `output`, what the norm returned.
        "seed": uint32[2], if there was dropout and "x" is wanted.
        "scale": [D].
      output: None, or (variance [N], shift [D], inverse [D]) such that the normalised
        input is `(saved - shift) * inverse`; the variance may be None where neither "x"
        nor "residual" is wanted.
      rules: the formula.
      outs: the wanted gradients and their dtypes: "x", "residual" (that of the sum),
        "scale", "bias".
      block: rows in a block; None for a size that fits well.

    Returns:
      A dict with the keys of `outs`.

    Raises:
      NotImplementedError: another dtype, rows too wide, or an empty array.
    """
    g = arrays["g"]
    big = {k: like(g, g.shape, d) for k, d in outs.items() if k in ("x", "residual")}
    _check(g, arrays.get("g_total"), arrays["saved"], *big.values())
    blocks = _RowBlocks(g.shape, block)
    var, shift, inverse = (None,) * 3 if output is None else output
    ins = _laid_out(arrays | {"shift": shift, "inverse": inverse})
    if var is not None:
        ins["var"] = blocks.pack(var)
    if not (rules.rate and "x" in outs):
        ins.pop("seed", None)
    sums = {k: like(g, (1, blocks.width), jnp.float32) for k in outs if k not in big}
    body = functools.partial(_backward_body, rules, blocks)
    got = _call(
        blocks, body, "norm_backward", ins, big | sums, arithmetic.donors(big, ins)
    )
    return {k: x if k in big else x[0].astype(outs[k]) for k, x in got.items()}
