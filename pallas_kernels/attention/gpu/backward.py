"""Attention's backward pass on Hopper: two kernels, each from the row statistics.

In one a block of queries stays and keys stream past it, for the gradient of the
queries. In the other a block of keys stays and the queries of all heads that share it
stream past, for the gradients of keys and values, which then need no sum over heads
afterwards; its tiles have queries along their second axis.

Limits: both recompute the logits and dropout's bits, so there are seven products where
a single kernel would need five. That kernel would have to sum the gradient of the
queries in memory, in float32 and in another order each time. A bias that differs among
queries is copied, transposed, for the second kernel.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arrays import like, padded
from pallas_kernels.attention.gpu.programs import (
    LogitsTile,
    accumulate,
    bounds,
    over_keys,
    product,
    row_at,
)
from pallas_kernels.attention.gpu.tables import (
    GpuCase,
    MaskTables,
    live_queries,
    make_case,
    make_tables,
    row_statistics,
    transposed,
)
from pallas_kernels.attention.inputs import Inputs, Rules
from pallas_kernels.gpu import TILED, Named, launch, load_once, store, stream

_F32 = jnp.float32


def backward(
    inputs: Inputs,
    results,
    g,
    rules: Rules,
    *,
    wanted: frozenset[str],
    blocks: tuple[int | None, int | None] = (None, None),
):
    """(dq, dk, dv, None): see the package `attention`.

    For {"v"} alone, v and o are not read and may be None.
    """
    if "bias" in wanted:
        raise NotImplementedError("no gradient of the bias")
    o, row_max, row_log_sum = results
    case = make_case(rules, inputs, "backward", blocks)
    tables = make_tables(case, inputs)
    g = live_queries(case, g, inputs.extras.q_len)
    arrays = {"q": inputs.q, "g": g, "k": inputs.k}
    rows = row_statistics(case, row_max, row_log_sum, inputs.extras.q_len)
    if wanted & {"q", "k"}:
        arrays["v"] = inputs.v
        delta = g.astype(_F32) * o.astype(_F32)
        delta = jnp.swapaxes(delta.sum(axis=-1), 1, 2)
        rows["delta"] = padded(delta, case.block_q)
    tables = tables._replace(per_query=tables.per_query | rows)
    of_keys = [x for x in ("k", "v") if x in wanted]
    got = {"q": _of_queries(case, arrays, tables)} if "q" in wanted else {}
    if of_keys:
        got |= _of_keys(case, arrays, transposed(case, tables), of_keys)
    return got.get("q"), got.get("k"), got.get("v"), None


def _probabilities(tile: LogitsTile, products, seen):
    """The softmax, from the row statistics."""
    x = tile.logits(products, seen)
    top, log_total = (tile.of_queries(tile.per_query[x]) for x in ("top", "log_total"))
    return jnp.exp2((x - top) - log_total)


def _logit_gradient(tile: LogitsTile, p, dp, seen):
    """Not yet scaled; from the probabilities and the gradient of what came of them."""
    factor = np.float32(1 / (1 - tile.case.rules.rate))
    ds = p * (tile.dropped(dp) * factor - tile.of_queries(tile.per_query["delta"]))
    ds = ds if seen is None else jnp.where(seen, ds, np.float32(0))
    return ds.astype(tile.case.dtype)


def _of_queries(case: GpuCase, arrays: Named, tables: MaskTables) -> jax.Array:
    def step(tile, here, k, v, dq):
        seen = tile.seen()
        p = _probabilities(tile, product(here["q"], k), seen)
        ds = _logit_gradient(tile, p, product(here["g"], v), seen)
        return accumulate(dq, ds, k)

    start = lambda: jnp.zeros((case.block_q, case.size), _F32)
    end = lambda dq: {"dq": dq * np.float32(case.rules.scale)}
    outs = {"dq": like(arrays["q"], arrays["q"].shape, case.dtype)}
    got = over_keys("jaxmem_attention_dq", case, arrays, tables, outs, start, step, end)
    return got["dq"]


def _of_keys(
    case: GpuCase, arrays: Named, tables: MaskTables, wanted
) -> dict[str, jax.Array]:
    """The gradients of those of k and v that `wanted` names."""
    stay = ("k", "v") if "k" in wanted else ("k",)
    inputs = {x: arrays[x] for x in ("q", "g", *stay)}
    inputs |= tables.per_query | tables.per_key | tables.rest
    tile = plgpu.SMEM((case.block_kv, case.size), case.dtype)
    local: Named = {"k_here": tile, "v_here": tile}
    for x, table in tables.per_key.items():
        local[f"{x}_here"] = plgpu.SMEM((case.block_kv,), table.dtype)
    local["arrived"] = plgpu.Barrier(num_arrivals=len(stay) + len(tables.per_key))
    out = like(arrays["k"], arrays["k"].shape, case.dtype)
    outs = {f"d{x}": out for x in wanted}

    def program(refs):
        _keys_program(case, refs, tables, wanted, stay)

    grid = {"batch": case.batch, "heads": case.kv_heads, "blocks": case.kv_blocks}
    got = launch("jaxmem_attention_dkv", program, inputs, outs, grid, local, TILED)
    return {x: got[f"d{x}"] for x in wanted}


def _keys_program(case: GpuCase, refs: Named, tables: MaskTables, wanted, stay) -> None:
    b, kv_head = lax.axis_index("batch"), lax.axis_index("heads")
    j = lax.axis_index("blocks")
    rows = pl.ds(j * case.block_kv, case.block_kv)
    copies = [(refs[x].at[b, rows, kv_head], refs[f"{x}_here"]) for x in stay]
    for x in tables.per_key:
        source = refs[x].at[(*row_at(refs[x], b, kv_head), rows)]
        copies.append((source, refs[f"{x}_here"]))
    load_once(copies, refs["arrived"])
    keys = {x: refs[f"{x}_here"][...] for x in tables.per_key}
    first, steps = bounds(refs, b, j, case.q_blocks)

    def visit(indices, got, sums):
        queries = {x: got[x][...] for x in tables.per_query}
        position = j * case.block_kv
        tile = LogitsTile(case, 1, queries, keys, position, got.get("bias_tile"))
        seen, sums = tile.seen(), dict(sums)
        p = _probabilities(tile, product(refs["k_here"], got["q"]), seen)
        if "v" in wanted:
            dropped = tile.dropped(p).astype(case.dtype)
            sums["v"] = accumulate(sums["v"], dropped, got["g"])
        if "k" in wanted:
            ds = _logit_gradient(tile, p, product(refs["v_here"], got["g"]), seen)
            sums["k"] = accumulate(sums["k"], ds, got["q"])
        return sums

    zeros = {x: jnp.zeros((case.block_kv, case.size), _F32) for x in wanted}
    specs = _query_specs(case, refs, tables, b, kv_head, j, first)
    sums = stream(refs, specs, (case.group, steps), visit, zeros)
    factors = {"k": case.rules.scale, "v": 1 / (1 - case.rules.rate)}
    for x in wanted:
        total = sums[x] * np.float32(factors[x])
        refs[f"{x}_here"][...] = total.astype(case.dtype)
    store([(refs[f"{x}_here"], refs[f"d{x}"].at[b, rows, kv_head]) for x in wanted])


def _query_specs(
    case: GpuCase, refs: Named, tables: MaskTables, b, kv_head, j, first
) -> Named:
    """The blocks that stream past block `j` of the keys: of each head, all queries."""
    head = lambda member: kv_head * case.group + member
    specs: Named = dict.fromkeys(
        ("q", "g"),
        plgpu.BlockSpec(
            (None, case.block_q, None, case.size),
            lambda member, i: (b, i + first, head(member), 0),
        ),
    )
    for x in tables.per_query:
        specs[x] = plgpu.BlockSpec(
            (None, None, case.block_q),
            lambda member, i, ref=refs[x]: (*row_at(ref, b, head(member)), i + first),
        )
    if "bias_tile" in tables.rest:
        ref = refs["bias_tile"]
        specs["bias_tile"] = plgpu.BlockSpec(
            (None, None, case.block_kv, case.block_q),
            lambda member, i: (*row_at(ref, b, head(member)), j, i + first),
        )
    return specs
