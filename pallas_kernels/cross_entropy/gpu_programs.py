"""Cross entropy's programs on Hopper: what one warpgroup does with tiles of logits.

A tile is 128 tokens by 128 columns of the vocabulary, in registers as tensor cores
leave it. Features stream past it through shared memory in chunks; its sums start from
the bias. Numbers of a token are vectors along the tile's first axis. `gpu.py` of the
parent package explains when copies and products become visible.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._compat import simulated_platform, with_layout
from pallas_kernels.arrays import dot, like
from pallas_kernels.cross_entropy.inputs import LOWEST, logits_gradient, only
from pallas_kernels.gpu import TILED, Named, launch, load_once, spread, store, stream

TOKENS, COLUMNS, CHUNK = 128, 128, 64
_NOT_OF_TOKENS = "x", "kernel", "first", "bias"
_TILE = TOKENS, COLUMNS
_ROW = plgpu.Layout.WGMMA.reduce(1)
_F32 = jnp.float32


class GpuLoss(NamedTuple):
    """The static part. `axis` is the kernel's axis of the vocabulary.

    Of all tokens and columns a launch does `rows` and `columns`.
    """

    axis: int
    softcap: float | None
    vocabulary: int
    features: int
    rows: int
    columns: int

    @property
    def row_blocks(self) -> int:
        return pl.cdiv(self.rows, TOKENS)

    @property
    def column_blocks(self) -> int:
        return pl.cdiv(self.columns, COLUMNS)


def _accumulate(acc, a, b, axis: int):
    """acc plus the product of two tiles in shared memory; `b` as the kernel lies."""
    if simulated_platform():
        return acc + dot(a[...], b[...], (1, 1 - axis))
    b = b if axis else b.transpose((1, 0))
    add = pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))
    return add(plgpu.ACC.init(acc))


def _logits(case: GpuLoss, refs: Named, row, column):
    """The tile whose first token is `row`, and first column `column`."""
    acc = with_layout(jnp.zeros(_TILE, _F32), plgpu.Layout.WGMMA)
    if "bias" in refs:
        place = refs["bias"].at[pl.ds(column, COLUMNS)]
        load_once([(place, refs["bias_here"])], refs["bias_arrived"])
        acc = spread(refs["bias_here"][...], _TILE, 1)
    x = plgpu.BlockSpec((pl.Element(TOKENS), CHUNK), lambda k: (row, k))
    if case.axis:
        w = plgpu.BlockSpec((CHUNK, pl.Element(COLUMNS)), lambda k: (k, column))
    else:
        w = plgpu.BlockSpec((pl.Element(COLUMNS), CHUNK), lambda k: (column, k))

    def step(indices, got, acc):
        return _accumulate(acc, got["x"], got["kernel"], case.axis)

    chunks = (case.features // CHUNK,)
    logits = stream(refs, {"x": x, "kernel": w}, chunks, step, acc)
    return logits if case.softcap is None else _capped(logits, case.softcap)


def _capped(logits, softcap: float):
    """By the exponential, since the hyperbolic tangent of a GPU has eleven bits."""
    e = jnp.exp(logits * np.float32(2 / softcap))
    return np.float32(softcap) - np.float32(2 * softcap) / (e + 1)


def _column_numbers(case: GpuLoss, column):
    """(the number of each logit's column, where it is one or None: everywhere)."""
    number = lax.broadcasted_iota(jnp.int32, _TILE, 1) + column
    if case.vocabulary % COLUMNS == 0:
        return number, None
    return number, number < case.vocabulary


def _scratch(inputs: Named, vectors: Named) -> Named:
    """Shared memory of the numbers of a block of tokens, and barriers."""
    scratch: Named = {
        f"{name}_here": plgpu.SMEM((TOKENS,), x.dtype) for name, x in vectors.items()
    }
    loaded = sum(name in inputs for name in vectors)
    scratch["arrived"] = plgpu.Barrier(num_arrivals=loaded)
    if "bias" in inputs:
        scratch["bias_here"] = plgpu.SMEM((COLUMNS,), _F32)
        scratch["bias_arrived"] = plgpu.Barrier()
    return scratch


def statistics(case: GpuLoss, inputs: Named, splits: int, names: list[str]):
    """What is known of each token, float32 [splits, row blocks * TOKENS].

    Args:
      inputs: "x", "kernel", "labels" [row blocks * TOKENS], and maybe "bias" [column
        blocks * COLUMNS].
      splits: in how many parts the vocabulary is divided, each for programs of its own.
      names: of "top", "total", the sum of `exp(logits - top)`, "hit", and "sum".
    """
    blocks = -(-case.column_blocks // splits)
    out = like(inputs["x"], (splits, case.row_blocks * TOKENS), _F32)
    outs = dict.fromkeys(names, out)
    scratch = _scratch(inputs, {"labels": inputs["labels"], **outs})

    def program(refs):
        split, i = lax.axis_index("splits"), lax.axis_index("rows")
        here = pl.ds(i * TOKENS, TOKENS)
        load_once([(refs["labels"].at[here], refs["labels_here"])], refs["arrived"])
        labels = with_layout(refs["labels_here"][...], _ROW)

        def visit(j, rows):
            column = (split * blocks + j) * COLUMNS
            logits = _logits(case, refs, i * TOKENS, column)
            return _visited(case, rows, logits, labels, column)

        zero = with_layout(jnp.zeros((TOKENS,), _F32), _ROW)
        rows = {name: zero + LOWEST if name == "top" else zero for name in names}
        count = jnp.minimum(blocks, case.column_blocks - split * blocks)
        rows = lax.fori_loop(0, count, visit, rows)
        for name, value in rows.items():
            refs[f"{name}_here"][...] = value
        store([(refs[f"{name}_here"], refs[name].at[split, here]) for name in names])

    grid = {"splits": splits, "rows": case.row_blocks}
    name = "jaxmem_cross_entropy_forward"
    return launch(name, program, inputs, outs, grid, scratch, TILED)


def _visited(case: GpuLoss, rows: Named, logits, labels, column) -> Named:
    """The numbers of tokens after one more tile."""
    number, inside = _column_numbers(case, column)
    masked = only(inside, logits, -np.inf)
    top = jnp.maximum(rows["top"], masked.max(axis=1))
    part = jnp.exp(masked - spread(top, _TILE, 0)).sum(axis=1)
    here = number == spread(labels, _TILE, 0)
    after = {
        "top": top,
        "total": rows["total"] * jnp.exp(rows["top"] - top) + part,
        "hit": rows["hit"] + jnp.where(here, logits, np.float32(0)).sum(axis=1),
    }
    if "sum" in rows:
        after["sum"] = rows["sum"] + only(inside, logits, 0).sum(axis=1)
    return after


def gradient(case: GpuLoss, inputs: Named, sums: bool) -> dict[str, jax.Array]:
    """The cotangents "d" [rows, columns] of logits, in the dtype of x.

    Args:
      inputs: "x", "kernel", maybe "bias", "first" (int32[2]: how many blocks of tokens
        and of columns come before these), and vectors of these tokens: "labels" and
        what `logits_gradient` asks for.
      sums: whether to give "sums" too, those over each block of tokens, float32.
    """
    x = inputs["x"]
    outs = {"d": like(x, (case.rows, case.columns), x.dtype)}
    if sums:
        outs["sums"] = like(x, (case.row_blocks, case.columns), _F32)
    vectors = {k: t for k, t in inputs.items() if k not in _NOT_OF_TOKENS}
    scratch = _scratch(inputs, vectors)
    scratch["d_here"] = plgpu.SMEM(_TILE, x.dtype)
    if sums:
        scratch["sums_here"] = plgpu.SMEM((COLUMNS,), _F32)

    def program(refs):
        i, j = lax.axis_index("rows"), lax.axis_index("columns")
        here, there = pl.ds(i * TOKENS, TOKENS), pl.ds(j * COLUMNS, COLUMNS)
        copies = [(refs[name].at[here], refs[f"{name}_here"]) for name in vectors]
        load_once(copies, refs["arrived"])
        before = refs["first"]
        d = _tile_gradient(case, refs, vectors, before[0] + i, before[1] + j)
        out = [(refs["d_here"], refs["d"].at[here, there])]
        refs["d_here"][...] = d.astype(x.dtype)
        if sums:
            refs["sums_here"][...] = d.sum(axis=0)
            out.append((refs["sums_here"], refs["sums"].at[i, there]))
        store(out)

    grid = {"columns": case.column_blocks, "rows": case.row_blocks}
    name = "jaxmem_cross_entropy_gradient"
    return launch(name, program, inputs, outs, grid, scratch, TILED)


def _tile_gradient(case: GpuLoss, refs: Named, vectors: Named, i, j):
    """The cotangents of the tile of the `i`-th block of tokens, `j`-th of columns."""
    logits = _logits(case, refs, i * TOKENS, j * COLUMNS)
    number, inside = _column_numbers(case, j * COLUMNS)

    def row(name):
        if name not in vectors:
            return None
        return spread(with_layout(refs[f"{name}_here"][...], _ROW), _TILE, 0)

    here = number == row("labels")
    return only(inside, logits_gradient(case.softcap, logits, here, row), 0)
