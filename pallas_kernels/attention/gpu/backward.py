"""Attention's backward pass on Hopper: kernels that start from the row statistics.

In one a block of queries stays and keys stream past it, for the gradient of the
queries. In the other a block of keys stays and the queries of all heads that share it
stream past (`over_queries`), for the gradients of keys and values, which then need no
sum over heads afterwards, and for that of a bias that is the same for all queries; that
of any other bias is in `bias`.

Limits: both recompute the logits and dropout's bits, so there are seven products where
a single kernel would need five. A sketch of that kernel was compiled (two warpgroups
that exchange the gradient of the logits, and add tiles of the gradient of the queries
in memory). By its machine code its busiest pipe, shared memory, takes 0.82 to 0.89 of
the clocks of the busiest pipes of these two. In exchange the sums take four bytes for
each element of the queries, in an order that differs from run to run, and two more
passes over them; both warpgroups wait for each other twice a step; and no simulator
adds in memory, so it could not be tested. In shared memory there is room for the sums
of 256 queries alone. A bias that differs among queries is copied, transposed, for the
second kernel.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arrays import like, padded
from pallas_kernels.attention.gpu.bias import gradient_of_bias
from pallas_kernels.attention.gpu.case import GpuCase, make_case
from pallas_kernels.attention.gpu.gradients import gradient_of_logits
from pallas_kernels.attention.gpu.logits import accumulate
from pallas_kernels.attention.gpu.over_keys import Steps, over_keys
from pallas_kernels.attention.gpu.over_queries import gradients_of_keys
from pallas_kernels.attention.gpu.tables import (
    MaskTables,
    live_queries,
    make_tables,
    row_statistics,
    transposed,
)
from pallas_kernels.attention.inputs import Inputs, Rules, sees_nothing
from pallas_kernels.gpu import Named

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
    """(dq, dk, dv, dbias): see the package `attention`.

    For {"v"} alone, v and o are not read and may be None.
    """
    o, row_max, row_log_sum = results
    q_len = inputs.extras.q_len
    g, vectors = live_queries(g, q_len), {}
    arrays = {"q": inputs.q, "g": g, "k": inputs.k}
    if wanted - {"v"}:
        arrays["v"] = inputs.v
        delta = g.astype(_F32) * o.astype(_F32)
        vectors["delta"] = jnp.swapaxes(delta.sum(axis=-1), 1, 2)

    def prepared(kernel: str, blocks=blocks):
        case = make_case(rules, inputs, kernel, blocks)
        tables = make_tables(case, inputs)
        # A bias, or a row that sees nothing, may make a maximum so low that it would
        # swallow the logarithm in a sum.
        hidden = sees_nothing(case.rules, inputs) is not None
        apart = hidden or inputs.bias is not None
        rows = row_statistics(case, row_max, row_log_sum, q_len, apart)
        rows |= {x: padded(y, case.block_q) for x, y in vectors.items()}
        return case, tables._replace(per_query=tables.per_query | rows)

    got, of_keys = {}, [x for x in ("k", "v") if x in wanted]
    if "bias" in wanted:
        if inputs.bias.shape[3] == 1:  # no softmax over keys depends on it
            got["bias"] = jnp.zeros_like(inputs.bias)
        elif inputs.bias.shape[2] == 1:
            of_keys.append("bias")
        else:
            got["bias"] = gradient_of_bias(arrays, *prepared("dbias", (None, None)))
    if "q" in wanted:
        case, tables = prepared("dq")
        got["q"] = _of_queries(case, arrays, tables)
    if of_keys:
        case, tables = prepared("dkv")
        got |= gradients_of_keys(case, arrays, transposed(case, tables), of_keys)
    if "bias" in of_keys:
        got["bias"] = _summed(got["bias"][:, :, None, : inputs.k.shape[1]], inputs.bias)
    return tuple(got.get(x) for x in ("q", "k", "v", "bias"))


def _summed(x, bias):
    """[b, heads, 1, s] summed over the axes along which `bias` is broadcast."""
    axes = tuple(i for i in range(4) if bias.shape[i] == 1)
    return x.sum(axis=axes, keepdims=True).astype(bias.dtype)


def _of_queries(case: GpuCase, arrays: Named, tables: MaskTables) -> jax.Array:
    def step(tile, here, k, v, dq, _):
        ds = gradient_of_logits(tile, here["q"], k, here["g"], v)
        return accumulate(dq, ds.astype(case.dtype), k)

    start = lambda: jnp.zeros((case.tile[0], case.size), _F32)
    end = lambda dq: {"dq": dq * np.float32(case.rules.scale)}
    outs = {"dq": like(arrays["q"], arrays["q"].shape, case.dtype)}
    steps, name = Steps(start, step, end, products=3), "jaxmem_attention_dq"
    return over_keys(name, case, arrays, tables, outs, steps)["dq"]
