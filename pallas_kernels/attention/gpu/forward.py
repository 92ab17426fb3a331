"""Attention's forward pass on Hopper: one program for each block of queries.

A block of queries stays in shared memory; keys and values stream past it, and the next
block is copied while one is multiplied. The running maximum, the sum and the output
stay in registers.
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.arrays import like
from pallas_kernels.attention.gpu.case import make_case
from pallas_kernels.attention.gpu.logits import accumulate, product
from pallas_kernels.attention.gpu.over_keys import Steps, over_keys
from pallas_kernels.attention.gpu.tables import from_base_2, live_queries, make_tables
from pallas_kernels.attention.inputs import Inputs, Rules
from pallas_kernels.gpu import spread

_F32 = jnp.float32


def forward(
    inputs: Inputs,
    rules: Rules,
    *,
    blocks: tuple[int | None, int | None] = (None, None),
):
    """(o, row maximum, logarithm of the row sum): see the package `attention`."""
    q = inputs.q
    case = make_case(rules, inputs, "forward", blocks)
    tables = make_tables(case, inputs)
    share = np.float32(1 - rules.rate)  # of probabilities that dropout keeps

    def start():
        rows = case.tile[0]
        o = jnp.zeros((rows, case.size), _F32)
        return o, jnp.full((rows,), -np.inf, _F32), jnp.zeros((rows,), _F32)

    def step(tile, here, k, v, carry, pingpong):
        o, top, total = carry
        products = product(here["q"], k, pingpong.change)
        x = tile.logits(products, tile.seen())
        higher = jnp.maximum(top, tile.row_max(products, x))
        shrink = jnp.exp2(top - higher)
        p = jnp.exp2(x - tile.of_queries(higher))
        total = total * shrink + p.sum(axis=1)
        p, o = tile.dropped(p.astype(case.dtype)), o * spread(shrink, o.shape, 0)
        p, o, higher, total = pingpong.change_after(p, o, higher, total)
        return accumulate(o, p, v), higher, total

    def end(carry):
        o, top, total = carry
        factor = np.float32(1) / (total * share)
        return {"o": o * spread(factor, o.shape, 0), "top": top, "total": total}

    number = like(q, case.rows, _F32)
    outs = {"o": like(q, q.shape, q.dtype), "top": number, "total": number}
    arrays = {"q": q, "k": inputs.k, "v": inputs.v}
    steps = Steps(start, step, end, products=2, pingpong=True)
    got = over_keys("jaxmem_attention", case, arrays, tables, outs, steps)
    top, total = (got[name][..., : case.queries] for name in ("top", "total"))
    return (
        live_queries(got["o"], inputs.extras.q_len),
        from_base_2(top),
        jnp.log(total),
    )
