"""The gradient of a bias that differs among queries, on Hopper.

A program has a tile of the gradient, [b|1, n|1, t, s] as the bias is. The heads of all
sequences that share the tile stream past it, and their gradients of logits are summed
in registers, in one order, so results are the same in each run. Of the sequences only
those are visited in which some query of the tile sees some key of it.

Limits: logits are computed a third time, beside those for dq and for dk and dv: two
products. A step reads tiles of q, g, k and v, 32 KiB with heads of 64, for two products
of 64 by 64, so the second-level cache most likely is what it waits for; k and v are
read for each head of those that share them. With heads of 128 a processor has room for
one program, of one warpgroup.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arrays import like
from pallas_kernels.attention.gpu.case import GpuCase
from pallas_kernels.attention.gpu.cost import cost_of
from pallas_kernels.attention.gpu.gradients import gradient_of_logits
from pallas_kernels.attention.gpu.grid import Grid
from pallas_kernels.attention.gpu.logits import MASK_WORDS, LogitsTile
from pallas_kernels.attention.gpu.ring import Span, Stream, with_ring
from pallas_kernels.attention.gpu.streams import row_at, shapes_of, word_shapes
from pallas_kernels.attention.gpu.tables import MaskTables, masks_all
from pallas_kernels.gpu import TILED, Named, launch, load_once, store


class BiasTile(NamedTuple):
    """A tile of the bias: where it is, and how many sequences and heads share it."""

    b: Any
    n: Any
    i: Any
    j: Any
    rows: Any
    columns: Any
    sequences: int
    heads: int

    @property
    def place(self) -> tuple[Any, ...]:
        return self.b, self.n, self.rows, self.columns


def gradient_of_bias(arrays: Named, case: GpuCase, tables: MaskTables) -> jax.Array:
    """Of the table "bias_tile", in its shape and dtype; `arrays` are q, g, k and v."""
    bias = tables.rest["bias_tile"]
    rest = {x: y for x, y in tables.rest.items() if x != "blocks"}
    if "blocks" in tables.rest:
        rest["visits"] = visits(case, tables, bias.shape[0])
    tables = tables._replace(rest=rest)
    inputs = arrays | tables.per_query | tables.per_key | rest
    lead = {"batch": bias.shape[0], "heads": bias.shape[1]}
    grid = Grid(lead | {"tiles": case.q_blocks * case.kv_blocks})
    outs = {"dbias": like(arrays["q"], bias.shape, bias.dtype)}
    local = {"here": plgpu.SMEM(case.tile, bias.dtype), "arrived": plgpu.Barrier()}

    def program(refs):
        stream = partial(_stream, case, tables, refs)
        with_ring(grid, stream, _shapes(case, tables), case.warpgroups)

    name = "jaxmem_attention_dbias"
    how, cost = (grid.launched, local, TILED), cost_of(case, 2, inputs | outs)
    return launch(name, program, inputs, outs, *how, cost=cost)["dbias"]


def visits(case: GpuCase, tables: MaskTables, lead: int) -> jax.Array:
    """Which sequences visit each tile, int32 [b|1, q_blocks, kv_blocks, 2 or more].

    How many with a mask, and without one; then, where sequences that share a tile
    differ, these in the order of the two, and those that do not visit it.
    """
    blocks = tables.rest["blocks"]
    j = jnp.arange(case.kv_blocks, dtype=jnp.int32)[None, None]
    first, whole, past, stop = (blocks[..., x, None] for x in range(4))
    visited, bare = (first <= j) & (j < stop), (whole <= j) & (j < past)
    if masks_all(case, tables):
        bare = jnp.zeros_like(bare)
    kind = jnp.where(bare, 1, jnp.where(visited, 0, 2)).astype(jnp.int32)
    rows = kind.shape[0] if lead > 1 else 1
    kind = kind.reshape(rows, -1, *kind.shape[1:])
    alike = case.batch // lead // kind.shape[1]  # sequences that a row stands for
    numbers = [(kind == x).sum(axis=1, dtype=jnp.int32) * alike for x in (0, 1)]
    if kind.shape[1] > 1:
        order = jnp.argsort(kind, axis=1, stable=True).astype(jnp.int32)
        numbers += [order[:, x] for x in range(kind.shape[1])]
    return jnp.stack(numbers, axis=-1)


def _stream(case: GpuCase, tables: MaskTables, refs: Named, b, n, at) -> Stream:
    """What tile `at` of the bias needs, and how it is summed."""
    tile, here = _tile(case, refs, b, n, at), refs["here"]
    loops = _loops(case, refs, tables, tile)

    def visit(masked, bias, step, got, total):
        queries, keys = (
            {x: got[x][...] for x in vectors}
            for vectors in (tables.per_query, tables.per_key)
        )
        first_key, got = tile.j * case.block_kv, got | {"bias_tile": bias}
        logits = LogitsTile(case, queries, keys, first_key, masked, got)
        arrays = (got[x] for x in ("q", "k", "g", "v"))
        return total + gradient_of_logits(logits, *arrays)

    def read(ring):
        load_once([(refs["bias_tile"].at[tile.place], here)], refs["arrived"])
        bias = here[...].astype(jnp.float32)  # in registers: all pairs have it
        total = jnp.zeros(case.tile, jnp.float32)
        for loop in loops:
            total = ring.visit(loop, partial(visit, loop.masked, bias), total)
        here[...] = total.astype(here.dtype)
        store([(here, refs["dbias"].at[tile.place])])

    sources, pair = _sources(case, refs, tables, tile), partial(_pair, refs, tile)
    return Stream(sources, 0, loops[-1].stop, read, pair)


def _tile(case: GpuCase, refs: Named, b, n, at) -> BiasTile:
    shape = refs["bias_tile"].shape
    i, j = (f(at, np.int32(case.kv_blocks)) for f in (lax.div, lax.rem))
    return BiasTile(
        b,
        n,
        i,
        j,
        pl.ds(i * case.block_q, case.block_q),
        pl.ds(j * case.block_kv, case.block_kv),
        case.batch // shape[0],
        case.heads // shape[1],
    )


def _numbers(refs: Named, tile: BiasTile) -> Callable:
    """The numbers that "visits" has of a tile."""
    ref = refs["visits"]
    row = tile.b if ref.shape[0] > 1 else 0
    return lambda x: ref[row, tile.i, tile.j, x]


def _loops(
    case: GpuCase, refs: Named, tables: MaskTables, tile: BiasTile
) -> list[Span]:
    """What visits a tile: of each sequence its heads, with a mask and without one."""
    masked = masks_all(case, tables)
    if "visits" not in refs:
        return [Span(0, tile.sequences * tile.heads, masked)]
    number = _numbers(refs, tile)
    first = number(0) * tile.heads
    if masked:
        return [Span(0, first, True)]
    return [Span(0, first, True), Span(first, first + number(1) * tile.heads, False)]


def _pair(refs: Named, tile: BiasTile, step) -> tuple[Any, Any]:
    """The sequence and the head that come at a step."""
    heads = np.int32(tile.heads)
    b, n = lax.div(step, heads), lax.rem(step, heads)
    if "visits" in refs and refs["visits"].shape[3] > 2:
        b = _numbers(refs, tile)(b + 2)
    return b if tile.sequences > 1 else tile.b, n if tile.heads > 1 else tile.n


def _sources(
    case: GpuCase, refs: Named, tables: MaskTables, tile: BiasTile
) -> dict[str, Callable]:
    """What is copied of a sequence and a head."""

    def of_tokens(x, places, group):
        ref, group = refs[x], np.int32(group)
        return lambda at: ref.at[at[0], places, lax.div(at[1], group)]

    def of_vector(x, places):
        ref = refs[x]
        return lambda at: ref.at[(*row_at(ref, *at), places)]

    def of_mask(which):
        mask, word = refs["mask"], 2 * tile.j + which
        return lambda at: mask.at[(*row_at(mask, *at), word, tile.rows)]

    sources = {x: of_tokens(x, tile.rows, 1) for x in ("q", "g")}
    sources |= {x: of_tokens(x, tile.columns, case.group) for x in ("k", "v")}
    sources |= {x: of_vector(x, tile.rows) for x in tables.per_query}
    sources |= {x: of_vector(x, tile.columns) for x in tables.per_key}
    if "mask" in tables.rest:
        sources |= {x: of_mask(which) for which, x in enumerate(MASK_WORDS)}
    return sources


def _shapes(case: GpuCase, tables: MaskTables) -> Named:
    """The tiles of `_sources`."""
    shapes = shapes_of(case, ("q", "g"), tables.per_query, case.block_q)
    shapes |= shapes_of(case, ("k", "v"), tables.per_key, case.block_kv)
    return shapes | word_shapes(case, tables)
