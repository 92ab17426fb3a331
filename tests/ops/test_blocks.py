"""Loops over blocks: what they hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import _jaxpr
from jaxmem.ops import dot_product_attention
from jaxmem.ops.common.blocks import BlockedAxis, BlockedOutput, blockwise


def doubled_and_summed(cut):
    def fn(x):
        outs = {
            "x": BlockedOutput(x.shape, x.dtype, 0),
            "total": BlockedOutput((), x.dtype, None),
        }

        def each(n, x):
            fresh = jnp.where(cut.fresh(n)[:, None] | cut.strided, x, 0.0)
            return {"x": 2 * x, "total": jnp.sum(fresh)}

        got = blockwise(cut, each, {"x": (x, 0)}, outs, (x,))
        return got["x"], got["total"]

    return fn


def loop_of(fn, *args):
    eqns = _jaxpr.walk(jax.make_jaxpr(fn)(*args))
    return next(eqn for eqn in eqns if eqn.primitive.name == "scan")


@pytest.mark.parametrize(("length", "strided"), [(12, False), (12, True), (10, False)])
def test_an_output_is_written_over_the_input_of_its_name(length, strided):
    """Unless blocks overlap: an earlier one would have written what a later reads."""
    cut = BlockedAxis(length, 4, strided)
    x = jnp.arange(length * 3.0).reshape(length, 3)
    fn = doubled_and_summed(cut)
    twice, total = fn(x)
    np.testing.assert_array_equal(twice, 2 * x)
    assert total == x.sum()
    loop = loop_of(fn, x)
    whole = [v for v in loop.invars if v.aval.shape == x.shape]
    assert len(whole) == (2 if cut.ragged else 1)


def test_attentions_backward_loop_holds_no_output_beside_the_rest():
    """Of the output it needs each row's sum alone; q's gradient lies where q did."""
    q = jnp.ones((4, 8, 2, 16))

    def gradients(q):
        attend = lambda q, k, v: dot_product_attention(q, k, v, block_size=4)
        out, pull = jax.vjp(attend, q, q + 1, q + 2)
        return pull(out)

    eqns = list(_jaxpr.walk(jax.make_jaxpr(gradients)(q)))
    _, backward = (e for e in eqns if e.primitive.name == "scan")
    whole = [v for v in backward.invars if v.aval.size == q.size]
    assert len(whole) == 6  # q, k, v, the output's gradient; those of k and v


def test_a_cotangent_of_padding_does_not_matter():
    """Not even where it is NaN: row sums of it are taken before the loop."""
    q = jnp.linspace(-1.0, 1.0, 2 * 13 * 2 * 4).reshape(2, 13, 2, 4)
    lengths = {"query_seq_lengths": jnp.array([6, 13])}
    attend = lambda *qkv: dot_product_attention(*qkv, block_size=5, **lengths)
    out, pull = jax.vjp(attend, q, q + 1, 2 * q)
    g = jnp.ones_like(out)
    jax.tree.map(np.testing.assert_array_equal, pull(g), pull(g.at[0, 6:].set(jnp.nan)))
