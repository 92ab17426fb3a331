"""Attention on a TPU: logits, probabilities and dropout's mask stay on the chip.

Queries lie along the lanes: logits are held as [keys, queries], so a row's maximum and
sum are [1, queries], go over sublanes, broadcast for free, and are written as they are.
A block of an array holds as many heads as fill 128 lanes (two of 64), straight from
[b, t, n * h]: a head's product contracts all 128 lanes with the others' set to zero,
which takes the matrix unit no longer. Head sizes that do not fill 128 lanes evenly, and
odd numbers of heads, are padded first.

Forward: for each block of queries, blocks of keys in sequence, with a running maximum
and sum. Backward, from the row statistics and delta = sum(g * o): for each block of
keys, blocks of queries in sequence, with dk and dv as sums, and dq of all queries as a
float32 sum on the chip. Where that has no room there (at 64 channels and bfloat16 from
some 9000 queries on), a pass of its own, in the order of the forward pass, makes dq.
Blocks hidden by position (causal, window, lengths) are neither computed nor fetched,
those hidden by segments not computed; see `dot_product.py` for rows that see nothing.

Through memory, in elements, with Q = b t n h, K = b s n h and `seen` the fraction of
block pairs that are visited: forward 2 Q + 2 K (t / block_q) seen; backward
4 K kh / n + Q + 2 Q (s / block_kv) seen, in two passes 2 Q + 2 K (t / block_q) seen
more; and float32 row statistics of b n t, two out, and three in for each block of keys.

Not optimal: blocks that are wholly visible are masked all the same. Nothing was timed
on a device.

A row whose visible keys all have a bias below -1.6e38 attends, in the XLA path, to keys
that the rules hide; here blocks that are not visited are left out.

Source: Dao et al., "FlashAttention" (2022); Dao, "FlashAttention-2" (2023).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _attention as common
from pallas_kernels._attention import MASKED, Inputs, Rules
from pallas_kernels._attention_tpu import (
    At,
    How,
    Scalars,
    call,
    extras,
    from_lanes,
    how_for,
    keys_outside,
    kv_lanes,
    lanes,
    queries_outside,
    repeats,
    scalars_for,
    visited,
)
from pallas_kernels._outputs import like

# -- one block, with queries along lanes


class Place(NamedTuple):
    """Where a block stands; `t` is [1, block_q] and `s` is [block_kv, 1]."""

    b: Any
    pack: Any
    t: Any
    s: Any
    q_len: Any  # None where all are whole
    kv_len: Any


def _place(how: How, scalars: Scalars, at) -> Place:
    sizes = how.sizes
    t = jax.lax.broadcasted_iota(jnp.int32, (1, sizes.block_q), 1)
    s = jax.lax.broadcasted_iota(jnp.int32, (sizes.block_kv, 1), 0)
    return Place(
        *(at.b, at.pack, t + at.i * sizes.block_q, s + at.j * sizes.block_kv),
        scalars.q_len[at.b] if how.q_len else None,
        scalars.kv_len[at.b] if how.kv_len else None,
    )


def _where(condition, x, other: float = 0.0):
    """`x` (float32), or `other`; a condition of None holds everywhere."""
    if condition is None:
        return x
    return jnp.where(condition, x, np.float32(other))


def _column(row):
    """[1, n] as [n, 1], of 32-bit numbers."""
    return jnp.broadcast_to(row, (8, row.shape[1])).T[:, :1]


def _head_alone(x, how: How, n: int):
    """`x` with zeros in place of the other heads of the pack."""
    if how.sizes.pack == 1:
        return x
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    head = how.sizes.head
    mine = (lane >= n * head) & (lane < (n + 1) * head)
    return _where(mine, x.astype(jnp.float32)).astype(x.dtype)


def _real_queries(how: How, place: Place):
    """Which queries the array, or their sequence, has; None if all."""
    if place.q_len is not None:
        return place.t < place.q_len
    return _below(place.t, how.sizes.queries, how.sizes.block_q)


def _real_keys(how: How, place: Place):
    """Which keys the array has; None if all."""
    return _below(place.s, how.sizes.keys, how.sizes.block_kv)


def _below(position, length: int, block: int):
    return position < length if length % block else None


def _rows_if(condition, x):
    """`x` with zeros in the rows where a condition [rows, 1] does not hold."""
    if condition is None:
        return x
    return _where(condition, x.astype(jnp.float32)).astype(x.dtype)


def _product(a, b, contract: tuple[int, int]):
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _bias(ins, n: int):
    """The bias of head n of the pack, broadcasting to [block_kv, block_q]; or None."""
    turned = {"bias": jnp.transpose, "bias_of_keys": _column, "bias_of_queries": None}
    for name in turned.keys() & ins.keys():
        x = ins[name][0, min(n, ins[name].shape[1] - 1)].astype(jnp.float32)
        turn = turned[name]
        return x if turn is None else turn(x)
    return None


def _logits(how: How, place: Place, ins, n: int):
    """(logits of head n [block_kv, block_q], which of them count or None)."""
    q, k = _head_alone(ins["q"][0], how, n), ins["k"][0]
    logits = _product(k, q, (1, 1)) * how.rules.scale
    bias = _bias(ins, n)
    if bias is not None:
        logits = logits + bias
    segments = ()
    if "q_segments" in ins:
        segments = ins["q_segments"][0], _column(ins["kv_segments"][0])
    seen = common.visible(how.rules, place.t, place.s, *segments, kv_len=place.kv_len)
    if how.hides and bias is not None:
        shown = jnp.broadcast_to(bias, logits.shape) > -np.inf
        seen = shown if seen is None else seen & shown
    logits = _where(seen, logits, MASKED)
    return _where(_real_keys(how, place), logits, -jnp.inf), seen


def _kept(how: How, scalars: Scalars, place: Place, n: int):
    """A function that puts zeros where dropout of head n has them."""
    if not how.rules.rate:
        return lambda x: x
    sizes = how.sizes
    b, head, t, s = (
        jnp.asarray(x).astype(jnp.uint32)
        for x in (place.b, place.pack * sizes.pack + n, place.t, place.s)
    )
    row = common.dropout_row(how.rules, b, head, t, sizes.heads, sizes.queries)
    keep = common.kept(how.rules, (scalars.seed[0], scalars.seed[1]), row, s)
    return lambda x: _where(keep, x)


def _rows_of(how: How, n: int) -> slice:
    return slice(n * how.sizes.head, (n + 1) * how.sizes.head)


# -- forward


def _forward_kernel(how: How, at: At, scalars: Scalars, ins, outs, scratch):
    place = _place(how, scalars, at)

    @pl.when(at.j == 0)
    def _():
        for ref, start in zip(scratch, (-jnp.inf, 0.0, 0.0), strict=True):
            ref[...] = jnp.full(ref.shape, start, jnp.float32)

    @pl.when(visited(how, scalars, at))
    def _():
        _add_keys(how, scalars, place, ins, *scratch)

    @pl.when(at.j == how.sizes.kv_blocks - 1)
    def _():
        _finish(how, place, outs, *scratch)


def _add_keys(how: How, scalars: Scalars, place: Place, ins, tops, totals, sums):
    """One block of keys into the running maximum, sum and sum of values."""
    values = _rows_if(_real_keys(how, place), ins["v"][0]).T
    for n in range(how.sizes.pack):
        logits, _ = _logits(how, place, ins, n)
        before, rows = tops[n], _rows_of(how, n)
        top = jnp.maximum(before, logits.max(axis=0, keepdims=True))
        base = _where(top > -jnp.inf, top)  # a bias may hide a whole block
        p, shrink = jnp.exp(logits - base), jnp.exp(before - base)
        tops[n] = top
        totals[n] = shrink * totals[n] + p.sum(axis=0, keepdims=True)
        p = _kept(how, scalars, place, n)(p).astype(values.dtype)
        sums[rows] = shrink * sums[rows] + _product(values[rows], p, (1, 0))


def _finish(how: How, place: Place, outs, tops, totals, sums):
    """Output and row statistics of a block of queries."""
    for n in range(how.sizes.pack):
        rows, total = _rows_of(how, n), totals[n]
        values = sums[rows] / (total * (1.0 - how.rules.rate))
        stats = tops[n], jnp.log(total)
        if place.q_len is not None:
            live = place.t < place.q_len
            values = _where(live, values)
            stats = _where(live, stats[0], MASKED), _where(live, stats[1])
        sums[rows] = values
        outs["top"][0, 0, n : n + 1], outs["log_total"][0, 0, n : n + 1] = stats
    outs["o"][0] = sums[...].T.astype(outs["o"].dtype)


def forward(
    inputs: Inputs,
    rules: Rules,
    *,
    block_q: int | None = None,
    block_kv: int | None = None,
):
    """(o [b, t, n, h], row maximum, logarithm of the row sum), the last [b, n, t].

    Args:
      inputs, rules: as in `_attention`.
      block_q, block_kv: multiples of 128; None for 512, or what has room on the chip.

    Raises:
      NotImplementedError: what this kernel does not do.
    """
    q, k, v, bias = inputs.q, inputs.k, inputs.v, inputs.masked_bias()
    how = how_for(rules, inputs, bias, block_q, block_kv)
    sizes, order = how.sizes, queries_outside(how)
    ins = {"q": lanes(q, sizes), "k": kv_lanes(k, sizes), "v": kv_lanes(v, sizes)}
    ins |= extras(sizes, bias, inputs)
    outs = {"o": like(q, ins["q"].shape, q.dtype)}
    for name in ("top", "log_total"):
        outs[name] = like(q, sizes.stats, jnp.float32)
    rows = sizes.pack, 1, sizes.block_q
    scratch = rows, rows, (sizes.width, sizes.block_q)
    name, scalars = "attention_forward", scalars_for(how, inputs)
    got = call(name, _forward_kernel, how, order, scalars, ins, outs, scratch)
    stats = (got[n].reshape(q.shape[0], -1, q.shape[1]) for n in ("top", "log_total"))
    return from_lanes(got["o"], q.shape[2], q.shape[3]), *stats


# -- backward


def _gradient_of_logits(how: How, scalars: Scalars, place: Place, ins, n: int):
    """(probabilities with dropout, gradient of the logits) of head n.

    Both without the factors `1 / (1 - rate)` and `scale`, which are left to the sums.
    The second is None where there are no values among `ins`: dv needs none.
    """
    logits, seen = _logits(how, place, ins, n)
    top, log_total = (ins[name][0, 0, n : n + 1] for name in ("top", "log_total"))
    real = _real_queries(how, place)
    p = _where(real, jnp.exp(logits - top - log_total))
    drop = _kept(how, scalars, place, n)
    if "v" not in ins:
        return drop(p), None
    g = _head_alone(ins["g"][0], how, n)
    dp = drop(_product(ins["v"][0], g, (1, 1)))
    ds = p * (dp - ins["delta"][0, 0, n : n + 1] * (1.0 - how.rules.rate))
    for condition in (seen, real, _real_keys(how, place)):
        ds = _where(condition, ds)
    return drop(p), ds


def _dq(how: How, place: Place, ins, ds, n: int):
    """A block of keys' part of dq of head n, [head, block_q]."""
    k = _rows_if(_real_keys(how, place), ins["k"][0]).T[_rows_of(how, n)]
    return _product(k, ds.astype(k.dtype), (1, 0))


def _dq_kernel(how: How, at: At, scalars: Scalars, ins, outs, scratch):
    (sums,) = scratch

    @pl.when(at.j == 0)
    def _():
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    @pl.when(visited(how, scalars, at))
    def _():
        place = _place(how, scalars, at)
        for n in range(how.sizes.pack):
            _, ds = _gradient_of_logits(how, scalars, place, ins, n)
            sums[_rows_of(how, n)] += _dq(how, place, ins, ds, n)

    @pl.when(at.j == how.sizes.kv_blocks - 1)
    def _():
        dq = sums[...] * _factor(how, "dq")
        outs["dq"][0] = dq.T.astype(outs["dq"].dtype)


def _dkv_kernel(how: How, at: At, scalars: Scalars, ins, outs, scratch):
    """dk and dv of a block of keys; and dq of all queries, which stays on the chip."""
    sums = dict(zip(sorted(outs), scratch, strict=True))
    step, mine = pl.program_id(3), _queries_of_group(how, at)

    @pl.when(step == 0)
    def _():
        for name in sums.keys() - {"dq_of_group"}:
            sums[name][...] = jnp.zeros(sums[name].shape, jnp.float32)

    @pl.when(at.j == 0)
    def _():
        if "dq_of_group" in sums:
            zeros = jnp.zeros((how.sizes.width, how.sizes.block_q), jnp.float32)
            sums["dq_of_group"][mine] = zeros

    @pl.when(visited(how, scalars, at))
    def _():
        _add_queries(how, scalars, _place(how, scalars, at), mine, ins, sums)

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        for name in sums.keys() - {"dq_of_group"}:
            total = _over_repeats(how, sums[name][...]) * _factor(how, name)
            outs[name][0] = total.astype(outs[name].dtype)

    @pl.when(at.j == how.sizes.kv_blocks - 1)
    def _():
        if "dq_of_group" in sums:
            channels, rows = mine
            dq = sums["dq_of_group"][mine] * _factor(how, "dq")
            outs["dq_of_group"][0, rows, channels] = dq.T.astype(
                outs["dq_of_group"].dtype
            )


def _queries_of_group(how: How, at: At):
    """Where a block of queries stands among all of its group: [width, queries]."""
    sizes = how.sizes
    member = jax.lax.rem(at.pack, jnp.int32(sizes.group))
    return (
        pl.ds(pl.multiple_of(member * sizes.width, sizes.width), sizes.width),
        pl.ds(pl.multiple_of(at.i * sizes.block_q, sizes.block_q), sizes.block_q),
    )


def _factor(how: How, name: str) -> float:
    """What `_gradient_of_logits` leaves to the sums."""
    return (1.0 if name == "dv" else how.rules.scale) / (1.0 - how.rules.rate)


def _add_queries(how: How, scalars: Scalars, place: Place, mine, ins, sums):
    """One block of queries into the sums of dk and dv, and of its own dq."""
    real = _below(_column(place.t), how.sizes.queries, how.sizes.block_q)
    dq = []
    for n in range(how.sizes.pack):
        p, ds = _gradient_of_logits(how, scalars, place, ins, n)
        for name, weights, other in (("dv", p, "g"), ("dk", ds, "q")):
            if name in sums and weights is not None:
                x = _rows_if(real, _head_alone(ins[other][0], how, n))
                sums[name][...] += _product(weights.astype(x.dtype), x, (1, 0))
        if "dq_of_group" in sums:
            dq.append(_dq(how, place, ins, ds, n))
    if dq:
        sums["dq_of_group"][mine] += jnp.concatenate(dq, axis=0)


def _over_repeats(how: How, x):
    """The sum over a pack of one key head, in each place; else `x`."""
    if repeats(how.sizes) == 1:
        return x
    shifts = (jnp.int32(n * how.sizes.head) for n in range(1, how.sizes.pack))
    return sum((pltpu.roll(x, shift, 1) for shift in shifts), x)


def backward(
    inputs: Inputs,
    o,
    row_max,
    row_log_sum,
    g,
    rules: Rules,
    *,
    wanted: frozenset[str],
    block_q: int | None = None,
    block_kv: int | None = None,
):
    """(dq, dk, dv, dbias), None for those not in `wanted`, of what `forward` gave.

    Args are those of `forward`, what it returned, the cotangent of o, and the names
    (of "q", "k", "v", "bias") that are `wanted`. For {"v"} alone, v and o are not read
    and may be None.

    Raises:
      NotImplementedError: what this kernel does not do, as the gradient of a bias.
    """
    if "bias" in wanted:
        raise NotImplementedError("a bias without a gradient (use stop_gradient)")
    q, k, bias = inputs.q, inputs.k, inputs.masked_bias()
    how = how_for(rules, inputs, bias, block_q, block_kv)
    sizes, scalars = how.sizes, scalars_for(how, inputs)
    ins = {"q": lanes(q, sizes), "k": kv_lanes(k, sizes), "g": lanes(g, sizes)}
    ins |= {"top": row_max, "log_total": row_log_sum}
    if wanted != {"v"}:
        ins["v"] = kv_lanes(inputs.v, sizes)
        delta = (g.astype(jnp.float32) * o.astype(jnp.float32)).sum(axis=-1)
        ins["delta"] = jnp.swapaxes(delta, 1, 2)
    stats = ins.keys() & {"top", "log_total", "delta"}
    ins |= {n: ins[n].reshape(sizes.stats) for n in stats}
    ins |= extras(sizes, bias, inputs)
    shapes = {"dq": ins["q"], "dk": ins["k"], "dv": ins["k"]}
    outs = {f"d{n}": like(g, shapes[f"d{n}"].shape, q.dtype) for n in wanted}
    grads = _gradients(how, scalars, ins, outs)
    dq, dk, dv = (grads.get(name) for name in shapes)
    return (
        None if dq is None else from_lanes(dq, *q.shape[2:]),
        *(None if x is None else from_lanes(x, *k.shape[2:]) for x in (dk, dv)),
        None,
    )


def _gradients(how: How, scalars: Scalars, ins, outs) -> dict[str, Any]:
    """`outs`, in one pass where dq has room on the chip, else in up to two."""
    if outs.keys() == {"dq"}:
        return _dq_pass(how, scalars, ins, outs)
    if "dq" not in outs:
        return _dkv_pass(how, scalars, ins, outs)
    dq = outs.pop("dq")
    if how.one_pass:
        grads = _dkv_pass(how, scalars, ins, outs | {"dq_of_group": dq})
        return grads | {"dq": grads["dq_of_group"]}
    return _dq_pass(how, scalars, ins, {"dq": dq}) | _dkv_pass(how, scalars, ins, outs)


def _dq_pass(how: How, scalars: Scalars, ins, outs):
    scratch = [(how.sizes.width, how.sizes.block_q)]
    order = queries_outside(how)
    return call("attention_dq", _dq_kernel, how, order, scalars, ins, outs, scratch)


def _dkv_pass(how: How, scalars: Scalars, ins, outs):
    sizes = how.sizes
    whole = sizes.group * sizes.width, sizes.q_blocks * sizes.block_q
    block = sizes.block_kv, sizes.width
    scratch = [whole if name == "dq_of_group" else block for name in sorted(outs)]
    order = keys_outside(how)
    return call("attention_dkv", _dkv_kernel, how, order, scalars, ins, outs, scratch)
