"""The programs of attention's kernel in which keys stay and queries stream past.

The queries of all heads that share a block of keys stream past it, for the gradients of
keys and values, and of a bias that is the same for all queries. Tiles have queries
along their second axis.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arrays import like
from pallas_kernels.attention.gpu.case import GpuCase
from pallas_kernels.attention.gpu.cost import cost_of
from pallas_kernels.attention.gpu.gradients import logit_gradient, probabilities
from pallas_kernels.attention.gpu.logits import (
    MASK_WORDS,
    LogitsTile,
    accumulate,
    product,
)
from pallas_kernels.attention.gpu.ring import Span, Stream, as_int32, with_ring
from pallas_kernels.attention.gpu.streams import (
    OF_PAIRS,
    bounds,
    grid_of,
    row_at,
    rows_of,
    rows_of_warpgroup,
    scratch_of,
    shapes_of,
    shapes_of_pairs,
    spans,
)
from pallas_kernels.attention.gpu.tables import MaskTables, masks_all
from pallas_kernels.gpu import TILED, Named, launch, load_once, store

_F32 = jnp.float32


def gradients_of_keys(
    case: GpuCase, arrays: Named, tables: MaskTables, wanted
) -> dict[str, jax.Array]:
    """The gradients that `wanted` names; that of the bias for each key and its head."""
    stay = ("k",) if wanted == ["v"] else ("k", "v")
    inputs = {x: arrays[x] for x in ("q", "g", *stay)}
    inputs |= tables.per_query | tables.per_key | tables.rest
    scratch = scratch_of(case, ("k", "v"), tables.per_key)
    local: Named = {f"{x}_here": ref for x, ref in scratch.items()}
    arrivals = len(stay) + len(tables.per_key)
    local["arrived"] = plgpu.Barrier(
        num_arrivals=arrivals, num_barriers=case.warpgroups
    )
    out = like(arrays["k"], arrays["k"].shape, case.dtype)
    if _by_head(case, tables):
        local["of_head"] = plgpu.Barrier(num_barriers=case.warpgroups)
    outs = {f"d{x}": out for x in wanted}
    if "bias" in wanted:
        heads = case.heads if _by_head(case, tables) else case.kv_heads
        shape = case.batch, heads, case.kv_blocks * case.block_kv
        outs["dbias"] = like(arrays["k"], shape, _F32)

    def program(refs):
        stream = partial(_stream_of_queries, case, refs, tables, wanted, stay)
        shapes = shapes_of(case, ("q", "g"), tables.per_query, case.block_q)
        shapes |= shapes_of_pairs(case, tables)
        with_ring(grid, stream, shapes, case.warpgroups, OF_PAIRS)

    sizes = {"batch": case.batch, "heads": case.kv_heads, "blocks": case.kv_blocks}
    grid, name = grid_of(case, tables, sizes), "jaxmem_attention_dkv"
    # logits, their gradient, and a product for each result
    products = len(stay) + sum(x != "bias" for x in wanted)
    how = grid.launched, local, TILED, case.launched
    cost = cost_of(case, products, inputs | outs)
    got = launch(name, program, inputs, outs, *how, cost)
    return {x: got[f"d{x}"] for x in wanted}


def _stream_of_queries(
    case: GpuCase, refs: Named, tables: MaskTables, wanted, stay, b, kv_head, j
) -> Stream:
    """What block `j` of the keys of a head needs, and how it is summed."""
    rows, mine = rows_of_warpgroup(case, j)
    here = {x: refs[f"{x}_here"].at[mine] for x in ("k", "v", *tables.per_key)}
    copies = [(refs[x].at[b, rows, kv_head], here[x]) for x in stay]
    for x in tables.per_key:
        copies.append((refs[x].at[(*row_at(refs[x], b, kv_head), rows)], here[x]))
    loops = _query_spans(case, refs, tables, b, j)
    first, count = loops[0].first, loops[-1].stop - loops[0].first

    def visit(masked, keys, step, got, sums):
        queries = {x: got[x][...] for x in tables.per_query}
        tile = LogitsTile(case, queries, keys, rows.start, masked, got)
        return _with_queries(tile, wanted, here, sums)

    def place(x):
        return (b, kv_head, rows) if x == "bias" else (b, rows, kv_head)

    def visit_head(ring, keys, member, sums):
        shift = member * count - first
        for loop in loops:
            moved = Span(loop.first + shift, loop.stop + shift, loop.masked)
            sums = ring.visit(moved, partial(visit, loop.masked, keys), sums)
        return sums

    def visit_with_bias(ring, keys, member, sums):
        at = b, kv_head * case.group + member, rows
        bias = _load_bias(refs, here, at, refs["of_head"].at[mine])
        sums = visit_head(ring, keys | {"bias": bias}, member, sums)
        return _store_bias(refs, here, at, sums)

    def read(ring):
        load_once(copies, refs["arrived"].at[mine])
        keys = {x: here[x][...] for x in tables.per_key}
        shape = case.tile[0], case.size
        zeros = lambda x: jnp.zeros(shape[:1] if x == "bias" else shape, _F32)
        sums = {x: zeros(x) for x in wanted}
        by_head = _by_head(case, tables)
        of_head = partial(visit_with_bias if by_head else visit_head, ring, keys)
        sums = lax.fori_loop(np.int32(0), np.int32(case.group), of_head, sums)
        left = [x for x in wanted if x != "bias" or not by_head]
        for x in left:
            total = sums[x] * np.float32(case.rules.scale) if x == "k" else sums[x]
            here[x][...] = total.astype(_F32 if x == "bias" else case.dtype)
        store([(here[x], refs[f"d{x}"].at[place(x)]) for x in left])

    sources = _query_sources(case, refs, tables, b, kv_head, j, first, count)
    return Stream(sources, 0, count * case.group, read)


def _with_queries(tile: LogitsTile, wanted, here: Named, sums: Named) -> Named:
    """The sums with what a block of queries adds to them; `here` are tiles of keys."""
    got, dtype, sums = tile.got, tile.case.dtype, dict(sums)
    seen, share = tile.seen(), tile.share()
    p = probabilities(tile, product(here["k"], got["q"]), seen)
    if "v" in wanted:
        dropped = p if share is None else p * share
        sums["v"] = accumulate(sums["v"], dropped.astype(dtype), got["g"])
    if wanted == ["v"]:
        return sums
    ds = logit_gradient(tile, p, product(here["v"], got["g"]), share, seen)
    if "bias" in wanted:
        sums["bias"] = sums["bias"] + ds.sum(axis=1)
    if "k" in wanted:
        sums["k"] = accumulate(sums["k"], ds.astype(dtype), got["q"])
    return sums


def _by_head(case: GpuCase, tables: MaskTables) -> bool:
    """Whether query heads that share keys differ in their bias of these."""
    bias = tables.per_key.get("bias")
    return case.group > 1 and bias is not None and bias.shape[1] > 1


def _load_bias(refs: Named, here: Named, at, barrier) -> jax.Array:
    """The bias of the keys of a block for one head; `at` is (sequence, head, keys)."""
    (b, head, rows), bias = at, refs["bias"]
    plgpu.commit_smem()  # after what the head before read
    load_once([(bias.at[(*row_at(bias, b, head), rows)], here["bias"])], barrier)
    return here["bias"][...]


def _store_bias(refs: Named, here: Named, at, sums: Named) -> Named:
    """Writes a head's gradient of this bias, if there is one, which is zero then."""
    if "bias" not in sums:
        return sums
    here["bias"][...] = sums["bias"]
    store([(here["bias"], refs["dbias"].at[at])])
    return sums | {"bias": jnp.zeros_like(sums["bias"])}


def _query_spans(case: GpuCase, refs: Named, tables: MaskTables, b, j) -> list[Span]:
    """What block `j` of the keys visits, of each head."""
    masked = masks_all(case, tables)
    if "blocks" in refs:
        first, whole, past, stop = bounds(refs, b, j)
        # Without a window the last query sees what others do (`tables.transposed`).
        return spans([first, whole, past if case.rules.window else stop, stop], masked)
    ragged, stop = case.keys % case.block_kv, case.q_blocks
    last = jnp.where(j == case.kv_blocks - 1, np.int32(stop), np.int32(0))
    return spans([0, last if ragged else 0, stop, stop], masked)


def _query_sources(
    case: GpuCase, refs: Named, tables: MaskTables, b, kv_head, j, first, count
) -> dict[str, Callable]:
    """What is copied at a step of block `j` of the keys.

    Each head that shares them has `count` steps, from block `first` on.
    """
    count = as_int32(count)
    head = lambda step: kv_head * case.group + lax.div(step, count)
    queries = lambda step: pl.ds(
        (lax.rem(step, count) + first) * case.block_q, case.block_q
    )
    sources: dict[str, Callable] = {
        x: lambda step, ref=refs[x]: ref.at[b, queries(step), head(step)]
        for x in ("q", "g")
    }
    for x in tables.per_query:
        sources[x] = lambda step, ref=refs[x]: ref.at[
            (*row_at(ref, b, head(step)), queries(step))
        ]
    if "bias_tile" in tables.rest:
        bias = refs["bias_tile"]

        def of_pairs(step, mine):
            keys = rows_of(case, j, mine)
            return bias.at[(*row_at(bias, b, head(step)), keys, queries(step))]

        sources["bias_tile"] = of_pairs
    if "mask" in tables.rest:
        mask = refs["mask"]
        word = lambda mine, which: 2 * (j * case.warpgroups + mine) + which
        for which, x in enumerate(MASK_WORDS):
            sources[x] = lambda step, mine, which=which: mask.at[
                (*row_at(mask, b, head(step)), word(mine, which), queries(step))
            ]
    return sources
