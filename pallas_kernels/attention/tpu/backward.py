"""Attention's backward pass on a TPU, from the row statistics of the forward pass."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.arrays import dot, like
from pallas_kernels.attention.inputs import Inputs, Rules
from pallas_kernels.attention.tpu import blocks as packing
from pallas_kernels.attention.tpu.bias import bytes_of_sums, gradient_of_bias
from pallas_kernels.attention.tpu.blocks import Scalars, TpuCase
from pallas_kernels.attention.tpu.gradients import (
    factor,
    for_gradients,
    gradient_of_logits,
)
from pallas_kernels.attention.tpu.grid import (
    GridPoint,
    call,
    for_visited,
    keys_outside,
    queries_outside,
)
from pallas_kernels.attention.tpu.logits import LogitsBlock, column, rows_where


def _dq(block: LogitsBlock, ds, n: int):
    """What a block of keys adds to dq of head n, [head, block_q]."""
    k = rows_where(block.real_keys(), block.ins["k"][0]).T[block.rows(n)]
    return dot(k, ds.astype(k.dtype), (1, 0))


def _dq_kernel(
    case: TpuCase, at: GridPoint, scalars: Scalars, ins, outs, scratch
) -> None:
    (sums,) = scratch

    @pl.when(at.j == 0)
    def _():
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    def add(block: LogitsBlock, ds, n: int) -> None:
        sums[block.rows(n)] += _dq(block, ds, n)

    for_gradients(case, at, scalars, ins, add)

    @pl.when(at.j == case.sizes.kv_blocks - 1)
    def _():
        dq = sums[...] * factor(case, "dq")
        outs["dq"][0] = dq.T.astype(outs["dq"].dtype)


def _dkv_kernel(
    case: TpuCase, at: GridPoint, scalars: Scalars, ins, outs, scratch
) -> None:
    """dk and dv of a block of keys; and dq of all queries, which stays on the chip."""
    sums = dict(zip(sorted(outs), scratch, strict=True))
    of_keys = [name for name in sums if name != "dq_of_group"]
    step, mine = pl.program_id(3), _queries_of_group(case, at)

    @pl.when(step == 0)
    def _():
        for name in of_keys:
            sums[name][...] = jnp.zeros(sums[name].shape, jnp.float32)

    @pl.when(at.j == 0)
    def _():
        if "dq_of_group" in sums:
            zeros = jnp.zeros((case.sizes.width, case.sizes.block_q), jnp.float32)
            sums["dq_of_group"][mine] = zeros

    def add(whole: bool) -> None:
        _add_queries(LogitsBlock(case, scalars, at, ins, whole), mine, sums)

    for_visited(case, scalars, at, add)

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        for name in of_keys:
            total = _over_repeats(case, sums[name][...]) * factor(case, name)
            outs[name][0] = total.astype(outs[name].dtype)

    @pl.when(at.j == case.sizes.kv_blocks - 1)
    def _():
        if "dq_of_group" in sums:
            (channels, rows), out = mine, outs["dq_of_group"]
            dq = sums["dq_of_group"][mine] * factor(case, "dq")
            out[0, rows, channels] = dq.T.astype(out.dtype)


def _queries_of_group(case: TpuCase, at: GridPoint):
    """Where a block of queries lies among all of its group: [width, queries]."""
    sizes = case.sizes
    member = jax.lax.rem(at.pack, jnp.int32(sizes.group))
    return (
        pl.ds(pl.multiple_of(member * sizes.width, sizes.width), sizes.width),
        pl.ds(pl.multiple_of(at.i * sizes.block_q, sizes.block_q), sizes.block_q),
    )


def _add_queries(block: LogitsBlock, mine, sums) -> None:
    """Adds a block of queries to the sums of dk and dv, and of its own dq."""
    real = block.queries_of_array(column(block.t))
    dq = []
    for n in range(block.case.sizes.pack):
        p, ds = gradient_of_logits(block, n)
        for name, weights, other in (("dv", p, "g"), ("dk", ds, "q")):
            if name in sums and weights is not None:
                x = rows_where(real, block.alone(block.ins[other][0], n))
                sums[name][...] += dot(weights.astype(x.dtype), x, (1, 0))
        if "dq_of_group" in sums:
            dq.append(_dq(block, ds, n))
    if dq:
        sums["dq_of_group"][mine] += jnp.concatenate(dq, axis=0)


def _over_repeats(case: TpuCase, x):
    """The sum over a pack of one repeated key head, in each of its places; else `x`."""
    if packing.repeats(case.sizes) == 1:
        return x
    shifts = (jnp.int32(n * case.sizes.head) for n in range(1, case.sizes.pack))
    return sum((pltpu.roll(x, shift, 1) for shift in shifts), x)


def backward(
    inputs: Inputs,
    results: tuple[Any, Any, Any],
    g,
    rules: Rules,
    *,
    wanted: frozenset[str],
    blocks: tuple[int | None, int | None] = (None, None),
):
    """(dq, dk, dv, dbias): see the package `attention`.

    For {"v"} alone, v and o are not read and may be None. `blocks` as in `forward`.
    """
    q, k, biases = inputs.q, inputs.k, packing.biases_of(inputs)
    case = packing.case_for(rules, inputs, biases, blocks)
    ins = _arrays(case, inputs, biases, results, g, wanted)
    shapes = {"q": ins["q"], "k": ins["k"], "v": ins["k"]}
    outs = {
        f"d{n}": like(g, x.shape, q.dtype) for n, x in shapes.items() if n in wanted
    }
    grads = {}
    if outs:
        grads = _gradients(case, packing.scalars_for(case, inputs), ins, outs)
    heads = {"dq": q.shape[2:], "dk": k.shape[2:], "dv": k.shape[2:]}
    dbias = None
    if "bias" in wanted:
        more = partial(bytes_of_sums, inputs.bias)
        case = packing.case_for(rules, inputs, biases, blocks, more)
        dbias = gradient_of_bias(case, inputs, ins)
    return *(
        packing.from_lanes(grads[name], *shape) if name in grads else None
        for name, shape in heads.items()
    ), dbias


def _arrays(
    case: TpuCase, inputs: Inputs, biases, results, g, wanted
) -> dict[str, Any]:
    """What blocks are taken from; the same for any sizes of these."""
    o, row_max, row_log_sum = results
    sizes = case.sizes
    lanes = partial(packing.lanes, sizes=sizes)
    ins = {"q": lanes(inputs.q), "k": packing.kv_lanes(inputs.k, sizes), "g": lanes(g)}
    stats = {"top": row_max, "log_total": row_log_sum}
    if wanted != {"v"}:
        ins["v"] = packing.kv_lanes(inputs.v, sizes)
        delta = (g.astype(jnp.float32) * o.astype(jnp.float32)).sum(axis=-1)
        stats["delta"] = jnp.swapaxes(delta, 1, 2)
    ins |= {name: x.reshape(sizes.stats) for name, x in stats.items()}
    return ins | packing.optional(sizes, biases, inputs)


def _gradients(case: TpuCase, scalars: Scalars, ins, outs) -> dict[str, Any]:
    """`outs`, in one pass if there is room for dq on the chip, else in up to two."""
    if outs.keys() == {"dq"}:
        return _dq_pass(case, scalars, ins, outs)
    if "dq" not in outs:
        return _dkv_pass(case, scalars, ins, outs)
    dq = outs.pop("dq")
    if case.one_pass:
        grads = _dkv_pass(case, scalars, ins, outs | {"dq_of_group": dq})
        return grads | {"dq": grads["dq_of_group"]}
    return _dq_pass(case, scalars, ins, {"dq": dq}) | _dkv_pass(
        case, scalars, ins, outs
    )


def _dq_pass(case: TpuCase, scalars: Scalars, ins, outs):
    scratch = [(case.sizes.width, case.sizes.block_q)]
    order = queries_outside(case)
    return call("attention_dq", _dq_kernel, case, order, scalars, ins, outs, scratch)


def _dkv_pass(case: TpuCase, scalars: Scalars, ins, outs):
    sizes = case.sizes
    whole = sizes.group * sizes.width, sizes.q_blocks * sizes.block_q
    block = sizes.block_kv, sizes.width
    scratch = [whole if name == "dq_of_group" else block for name in sorted(outs)]
    order = keys_outside(case)
    return call("attention_dkv", _dkv_kernel, case, order, scalars, ins, outs, scratch)
