"""What attention's kernels share of their streams: which blocks, and where they lie.

Two warpgroups of a program have a tile each, of the same streamed block.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.gpu.case import GpuCase
from pallas_kernels.attention.gpu.grid import Grid, make_grid
from pallas_kernels.attention.gpu.logits import MASK_WORDS
from pallas_kernels.attention.gpu.ring import Span, this_warpgroup
from pallas_kernels.attention.gpu.tables import MaskTables
from pallas_kernels.gpu import Named

OF_PAIRS = "bias_tile", *MASK_WORDS  # of which each warpgroup has its own


def grid_of(case: GpuCase, tables: MaskTables, sizes: dict[str, int]) -> Grid:
    """Of what stays, for programs that may take many blocks if they are of two."""
    if case.warpgroups == 1:  # then others of its processor work while one starts
        return Grid(sizes)
    return make_grid(sizes, "blocks" not in tables.rest)


def rows_of_warpgroup(case: GpuCase, block) -> tuple[Any, Any]:
    """The positions of this warpgroup in a block that stays, and its number."""
    mine = this_warpgroup(case.warpgroups)
    return rows_of(case, block, mine), mine


def rows_of(case: GpuCase, block, warpgroup) -> Any:
    """The positions of a warpgroup in a block that stays."""
    rows = case.tile[0]
    return pl.ds((block * case.warpgroups + warpgroup) * rows, rows)


def scratch_of(case: GpuCase, blocks, vectors: Named) -> Named:
    """Shared memory for each warpgroup's rows that stay, and for vectors over them."""
    own = case.warpgroups, case.tile[0]
    scratch: Named = {x: plgpu.SMEM((*own, case.size), case.dtype) for x in blocks}
    return scratch | {x: plgpu.SMEM(own, y.dtype) for x, y in vectors.items()}


def row_at(ref, b, n) -> tuple[Any, Any]:
    """The indices of a sequence and a head in [b|1, n|1, ...]."""
    return b if ref.shape[0] > 1 else 0, n if ref.shape[1] > 1 else 0


def bounds(refs: Named, b, i) -> list:
    """The four numbers that "blocks" has for block `i` that stays."""
    ref = refs["blocks"]
    row = b if ref.shape[0] > 1 else 0
    return [ref[row, i, x] for x in range(4)]


def spans(bounds: list, all_masked: bool) -> list[Span]:
    """Loops with a mask, without one, and with one, between bounds as in "blocks".

    There is no loop between two bounds that are one object, or the same number.
    """
    first, whole, past, stop = bounds
    if all_masked:
        return [Span(first, stop, True)]
    parts = Span(first, whole, True), Span(whole, past, False), Span(past, stop, True)
    return [x for x in parts if not _is_empty(x)]


def _is_empty(span: Span) -> bool:
    known = isinstance(span.first, int) and isinstance(span.stop, int)
    return span.first is span.stop or (known and span.first == span.stop)


def shapes_of(case: GpuCase, names, vectors: Named, length: int) -> Named:
    """The tiles of so many positions that `names` have, and of vectors over them."""
    tile = jax.ShapeDtypeStruct((length, case.size), case.dtype)
    of_vectors = {
        x: jax.ShapeDtypeStruct((length,), y.dtype) for x, y in vectors.items()
    }
    return dict.fromkeys(names, tile) | of_vectors


def shapes_of_pairs(case: GpuCase, tables: MaskTables) -> Named:
    """The tiles of what differs among pairs."""
    if "bias_tile" not in tables.rest:
        return word_shapes(case, tables)
    tile = jax.ShapeDtypeStruct(case.tile, tables.rest["bias_tile"].dtype)
    return {"bias_tile": tile} | word_shapes(case, tables)


def word_shapes(case: GpuCase, tables: MaskTables) -> Named:
    """Of a mask, which is copied in two words for each query of a tile."""
    words = jax.ShapeDtypeStruct(case.of_tile[:1], jnp.uint32)
    return dict.fromkeys(MASK_WORDS, words) if "mask" in tables.rest else {}
