"""Layer norm and RMS norm on TPUs, with dropout and a residual sum in the same pass.

A block of whole rows lies in on-chip memory, and is worked off in slabs of a few rows,
so that what is computed stays near the registers. The backward pass takes the
statistics of the input again from the rows it reads anyway: nothing is kept for it but
the input. It runs in place: the gradient of the input replaces the incoming one. The
gradients of scale and bias are summed in on-chip memory over the whole, sequential
grid.

Bytes moved, for N rows of D elements of b bytes:

    forward   N D b * 2, with a residual 4; and 8 N where the moments are wanted
    backward  N D b * 3, with dropout and residual 5; and 4 N from the output

Not optimal: one TensorCore works, where a chip has two that share a program (v4, v5p).
Nothing here has been timed on a device.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _compat, _norm, hashing
from pallas_kernels._norm import Rules, wide
from pallas_kernels._outputs import like

DTYPES = ("float32", "bfloat16")
LANES = 128
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


class _Cut:
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


def _dropped(rules: Rules, seed, position, x):
    """Dropout of a slab, whose rows are at `position`."""
    words = seed[0, 0], seed[0, 1]
    column = hashing.column_word(words, _iota((1, x.shape[1]), 1).astype(jnp.uint32))
    keep = _norm.keep(rules, words, position.astype(jnp.uint32), column)
    return _norm.dropped(rules, keep, x)


def _vector(x):
    """A parameter as a row of float32."""
    return None if x is None else wide(x).reshape(1, -1)


def _words(seed):
    """The seed in two axes, which `vmap` makes no part of a tile."""
    return None if seed is None else seed.reshape(1, 2)


def _whole(refs, *names):
    return (refs[n][...] if n in refs else None for n in names)


KINDS = {"seed": "seed", "mean": "stats", "var": "stats"}
KINDS |= dict.fromkeys(("scale", "bias", "shift", "inverse"), "vector")


def _call(cut: _Cut, body, name: str, ins: dict[str, Any], outs: dict[str, Any], over):
    """The kernel over all blocks; `over`: which output replaces which input."""
    ins = {k: x for k, x in sorted(ins.items()) if x is not None}
    outs = dict(sorted(outs.items()))
    spec = lambda names: {k: cut.spec(KINDS.get(k, "rows")) for k in names}
    places = {list(ins).index(i): list(outs).index(o) for o, i in over.items()}
    places = _compat.aliases(places, ragged=cut.rows % cut.block > 0)
    return pl.pallas_call(
        body,
        grid=(cut.count,),
        in_specs=(spec(ins),),
        out_specs=spec(outs),
        out_shape=outs,
        input_output_aliases=places,
        name=name,
    )(ins)


def _check(x, *others) -> None:
    _norm.check_dtypes(DTYPES, x, *others)
    if x.shape[1] > WIDEST:
        raise NotImplementedError(f"rows of at most {WIDEST} elements")
    if x.size == 0:
        raise NotImplementedError("arrays that are not empty")


def _forward_body(rules: Rules, cut: _Cut, ins, outs) -> None:
    scale, bias = _whole(ins, "scale", "bias")
    for name in {"mean", "var"} & set(outs):
        outs[name][...] = jnp.zeros(outs[name].shape, jnp.float32)

    def slab(first):
        rows = pl.ds(first, cut.slab)
        x = wide(ins["x"][rows, :])
        if "total" in outs:
            if rules.rate:
                x = _dropped(rules, ins["seed"], cut.position(first), x)
                x = wide(x.astype(ins["x"].dtype))
            total = (wide(ins["residual"][rows, :]) + x).astype(outs["total"].dtype)
            outs["total"][rows, :] = total
            x = wide(total)
        off, mean, var = _norm.moments(rules, x, _mean_of)
        y = _norm.affine(off, _norm.rstd(rules, var), scale, bias)
        outs["y"][rows, :] = y.astype(outs["y"].dtype)
        for name, stat in (("mean", mean), ("var", var)):
            if name in outs:
                cut.put(outs[name], first, stat)

    cut.loop(slab)


def forward(
    x, residual, seed, scale, bias, *, rules: Rules, dtype, stats: bool = False,
    block: int | None = None,
):  # fmt: skip
    """The norm of `x`, or of `residual + dropout(x)`, over the last axis.

    Args:
      x: [N, D], float32 or bfloat16.
      residual: [N, D], of its own dtype, or None.
      seed: uint32[2], where there is dropout.
      scale, bias: [D] or None.
      rules: the formula.
      dtype: of the output.
      stats: whether the moments are wanted.
      block: rows in a block; None: as many as fit well.

    Returns:
      A dict: "y" [N, D]; "total", the sum in the residual's dtype, where there is a
      residual; "var" [N] and, if centred, "mean" [N], float32, where they are wanted.

    Raises:
      NotImplementedError: another dtype, rows too wide, or an empty array.
    """
    _check(x, residual, jax.ShapeDtypeStruct((), dtype))
    cut = _Cut(x.shape, block)
    ins = {"x": x, "residual": residual, "seed": _words(seed)}
    ins |= {"scale": _vector(scale), "bias": _vector(bias)}
    outs = {"y": like(x, x.shape, dtype)}
    if residual is not None:
        outs["total"] = like(x, x.shape, residual.dtype)
    if stats:
        shape = (cut.count, *cut.stat_shape)
        names = ("mean", "var")[not rules.centred :]
        outs |= {name: like(x, shape, jnp.float32) for name in names}
    body = functools.partial(_forward_body, rules, cut)
    got = _call(cut, body, "norm_forward", ins, outs, {})
    return {k: cut.unpack(v) if KINDS.get(k) == "stats" else v for k, v in got.items()}


def _backward_body(rules: Rules, cut: _Cut, ins, outs) -> None:
    scale, shift, inverse = _whole(ins, "scale", "shift", "inverse")
    sums = [name for name in ("scale", "bias") if name in outs]

    @pl.when(pl.program_id(0) == 0)
    def _():
        for name in sums:
            outs[name][...] = jnp.zeros((1, cut.width), jnp.float32)

    def slab(first):
        rows = pl.ds(first, cut.slab)
        g, kept = wide(ins["g"][rows, :]), wide(ins["kept"][rows, :])
        if "inverse" in ins:
            var = cut.take(ins["var"], first) if "var" in ins else None
            xhat = (kept - shift) * inverse
        else:
            off, _, var = _norm.moments(rules, kept, _mean_of)
            xhat = off * _norm.rstd(rules, var)
        shares = {"scale": g * xhat, "bias": g}
        for name in sums:
            share = shares[name]
            if cut.rows % cut.block:
                share = jnp.where(cut.position(first) < cut.rows, share, 0.0)
            outs[name][...] += jnp.sum(share, axis=0, keepdims=True)
        if not {"residual", "x"} & set(outs):
            return
        u = g if scale is None else g * scale
        d = _norm.input_gradient(rules, u, xhat, var, _mean_of)
        if "g_total" in ins:
            d = d + wide(ins["g_total"][rows, :])
        if "residual" in outs:
            outs["residual"][rows, :] = d.astype(outs["residual"].dtype)
        if "x" in outs:
            if rules.rate:
                d = _dropped(rules, ins["seed"], cut.position(first), d)
            outs["x"][rows, :] = d.astype(outs["x"].dtype)

    cut.loop(slab)


def backward(
    g, g_total, kept, seed, scale, output, *, rules: Rules, outs: dict[str, Any],
    block: int | None = None,
):  # fmt: skip
    """The gradients of a norm, the first over the incoming one.

    Args:
      g: [N, D], the gradient of the output.
      g_total: [N, D], that of the sum, or None.
      kept: [N, D], what was normalised; with `output`, what the norm returned.
      seed: uint32[2], where there was dropout and "x" is wanted.
      scale: [D] or None.
      output: None, or (variance [N], shift [D], inverse [D]) such that the normalised
        input is `(kept - shift) * inverse`; the variance may be None where neither "x"
        nor "residual" is wanted.
      rules: the formula.
      outs: which gradients are wanted, and in which dtype: "x", "residual" (that of
        the sum), "scale", "bias".
      block: rows in a block; None: as many as fit well.

    Returns:
      A dict with the keys of `outs`.

    Raises:
      NotImplementedError: another dtype, rows too wide, or an empty array.
    """
    big = {k: like(g, g.shape, d) for k, d in outs.items() if k in ("x", "residual")}
    _check(g, g_total, kept, *big.values())
    cut = _Cut(g.shape, block)
    var, shift, inverse = (None,) * 3 if output is None else output
    ins = {"g": g, "g_total": g_total, "kept": kept, "scale": _vector(scale)}
    ins |= {"shift": _vector(shift), "inverse": _vector(inverse)}
    ins["var"] = None if var is None else cut.pack(var)
    ins["seed"] = _words(seed) if rules.rate and "x" in outs else None
    sums = {k: like(g, (1, cut.width), jnp.float32) for k in outs if k not in big}
    body = functools.partial(_backward_body, rules, cut)
    got = _call(cut, body, "norm_backward", ins, big | sums, _norm.donors(big, ins))
    return {k: x if k in big else x[0].astype(outs[k]) for k, x in got.items()}
