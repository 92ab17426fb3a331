"""Loops over blocks: what they hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.ir import jaxprs as _jaxpr
from jaxmem.ops import dot_product_attention, linear_cross_entropy
from jaxmem.ops.attention import codes as attention_codes
from jaxmem.ops.common import blocks as block_loops
from jaxmem.ops.common.blocks import BlockedAxis, BlockedOutput, blockwise
from jaxmem.ops.cross_entropy import rows as cross_entropy_rows


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


# -- barriers: what is tied to what, and what it is for


def layers(w, x, **options):
    """Attention in some layers, of four heads of 64."""
    for w_layer in w:
        q = (x @ w_layer).reshape(*x.shape[:2], 4, 64)
        options |= {"implementation": "xla"}
        x = x + dot_product_attention(q, 2 * q, q + 1, **options).reshape(x.shape)
    return x


def gradient(fn):
    return jax.grad(lambda *args: fn(*args).astype(jnp.float32).sum())


def of_layers(batch, length, layers=4):
    shapes = (layers, 256, 256), (batch, length, 256)
    return [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]


def scanned(w, x):
    def body(x, w_layer):
        return layers([w_layer], x, is_causal=True, block_size=128), None

    return jax.lax.scan(body, x, w)[0]


def losses(kernel, xs):
    """In a scan that has the labels as a constant."""
    labels = jnp.zeros(xs.shape[1], jnp.int32)

    def body(kernel, x):
        options = dict(block_size=1024, implementation="xla")
        loss = linear_cross_entropy(x, kernel, labels, **options)
        return kernel * loss.astype(kernel.dtype), loss

    return jax.lax.scan(body, kernel, xs)[1]


def temp_bytes(fn, args):
    return jaxmem.estimate(jax.jit(gradient(fn)), *args, target="h100").temp_bytes


def test_codes_wait_for_the_cotangent():
    """Both are read behind the barrier that ties them, and only there."""
    fn = gradient(lambda w, x: layers(w, x, save=8))
    jaxpr = jax.make_jaxpr(fn)(*of_layers(1, 8, 1))
    eqns = [e for e in _jaxpr.walk(jaxpr) if e.primitive.name == "optimization_barrier"]
    packed = [e for e in eqns if any(v.aval.dtype == jnp.uint8 for v in e.outvars)]
    assert len(packed) == 1
    read = {id(v) for e in _jaxpr.walk(jaxpr) for v in e.invars}
    assert all(id(v) in read for v in packed[0].outvars)


@pytest.mark.slow
def test_codes_that_wait_take_less(monkeypatch):
    def at_once(saved, g):
        coded = {n: x for n, x in saved.items() if attention_codes._is_coded(x)}
        return saved | {n: x.codes.recall(x) for n, x in coded.items()}, g

    args = of_layers(8, 256, layers=8)
    fn = lambda w, x: layers(w, x, save=8)
    waiting = temp_bytes(fn, args)
    monkeypatch.setattr(attention_codes, "recall", at_once)
    assert waiting < 0.95 * temp_bytes(lambda w, x: layers(w, x, save=8), args)


LOSSES = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((256, 8192), (4, 2048, 256))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "args"),
    [(scanned, of_layers(4, 512)), (losses, LOSSES)],
    ids=["attention", "cross entropy"],
)
def test_a_counter_that_is_tied_takes_less(fn, args, monkeypatch):
    tied = temp_bytes(fn, args)
    for module in (block_loops, cross_entropy_rows):
        monkeypatch.setattr(module, "tied", lambda n, x: n)
    assert tied < 0.95 * temp_bytes(lambda *args: fn(*args), args)
