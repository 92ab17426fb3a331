"""`schedule` updates a large leaf's parameter in the loop over its rows."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.ir import jaxprs, row_chunks
from jaxmem.ir.flatten import flatten
from jaxmem.ir.graph import by_shape
from jaxmem.optim import LowBit, adamw
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling.row_chunks import analysis, update
from jaxmem.scheduling.row_chunks.analysis import leaf_updates
from jaxmem.scheduling.row_chunks.update import RowChunks
from tests.sets import some_fast

FLOAT32 = 2.0**-23
SHAPE = (512, 64)
EIGHT, FOUR = LowBit(8), LowBit(4, block=32)
DYNAMIC = LowBit(8, code="dynamic", block=32, stochastic=True)


@pytest.fixture
def in_chunks(monkeypatch):
    """Of 128 rows (or 4 times 32), on CPU too where `schedule` makes the loop."""
    chosen = row_chunks.on_platforms

    def on_cpu_too(fn, chunks, platforms, *arrays):
        return chosen(fn, chunks, (*platforms, "cpu"), *arrays)

    monkeypatch.setattr(row_chunks, "LEAST_ELEMENTS", 1)
    monkeypatch.setattr(row_chunks, "_CHUNK", 64 * 128)
    monkeypatch.setattr(update, "on_platforms", on_cpu_too)


def step_of(how, watched=False):
    rate = lambda count: 1e-2 / (1.0 + count.astype(jnp.float32))
    tx = adamw(rate, weight_decay=0.1, bits=how)

    def loss(p, x):
        return jnp.mean((jnp.tanh(x @ p["w"]) + p["b"][None]) ** 2)

    def step(state, x):
        p, moments = state
        value, g = jax.value_and_grad(loss)(p, x)
        u, moments = tx.update(g, moments, p)
        seen = optax.tree.norm(u) if watched else value
        return (optax.apply_updates(p, u), moments), seen

    return tx, step


def start(tx, shape=SHAPE):
    r = np.random.default_rng(0)
    p = {"w": jnp.asarray(r.standard_normal(shape), jnp.float32)}
    p["b"] = jnp.zeros(shape[1])
    x = jnp.asarray(r.standard_normal((8, shape[0])), jnp.float32)
    return (p, tx.init(p)), x


def found(how, donated=True, watched=False):
    """(what is moved into the loop, the positions of the parameter and its result)."""
    tx, step = step_of(how, watched)
    closed = flatten(jax.make_jaxpr(step)(*start(tx)))
    aliases = by_shape(closed, range(len(closed.in_avals) - 1) if donated else ())
    place = [a.shape for a in closed.in_avals].index(SHAPE)
    return list(leaf_updates(closed, aliases)), place


@pytest.mark.fast("8-(512, 64)", "4-(200, 64)")
@pytest.mark.parametrize("shape", [SHAPE, (200, 64)], ids=str)
@pytest.mark.parametrize(
    "how", some_fast([EIGHT, DYNAMIC, FOUR], EIGHT, FOUR), ids=["8", "dynamic", "4"]
)
def test_equals_the_plain_step(in_chunks, how, shape):
    """In parts that each have rows of a chunk, and with rows that fill none."""
    tx, step = step_of(how)
    state, x = start(tx, shape)
    plain, ours = jax.jit(step), jaxmem.schedule(step, donate_argnums=0)
    chunks = row_chunks.chunks_of(shape)
    assert chunks is not None and chunks.outer == (4 if shape == SHAPE else 1)
    want = plain(plain(state, x)[0], x)
    got = ours(ours(state, x)[0], x)
    # the loop fuses otherwise: two steps of a few roundings each
    chex.assert_trees_all_close(got[0][0], want[0][0], rtol=0, atol=16 * FLOAT32)
    codes = zip(*map(jax.tree.leaves, (got[0][1], want[0][1])), strict=True)
    for a, b in codes:  # a moment between two codes may become the other
        assert (np.asarray(a) != np.asarray(b)).mean() <= 1e-3


@pytest.mark.parametrize("how", [EIGHT, DYNAMIC, FOUR], ids=["8", "dynamic", "4"])
@pytest.mark.slow
def test_the_loop_ends_with_the_parameter(in_chunks, how):
    """In the place of the old one; the array of updates is not among its results."""
    (plan,), place = found(how)
    wide = [(v, w) for v, w in plan.pairs.items() if v.aval.dtype == jnp.float32]
    wide = [(v, w) for v, w in wide if v.aval.shape == SHAPE]
    ((_, own),) = wide
    assert own is plan.jaxpr.jaxpr.invars[place]
    assert len(plan.pairs) == 5  # and codes and scales of two moments
    assert plan.platforms == (("tpu",) if how is EIGHT else ("tpu", "cuda", "rocm"))


def many(count=3):
    """A step of several large leaves, and its arguments."""
    tx = adamw(1e-2, bits=EIGHT)

    def step(state, x):
        p, moments = state
        loss = lambda p: sum(jnp.mean(jnp.tanh(x @ w) ** 2) for w in p)
        u, moments = tx.update(jax.grad(loss)(p), moments, p)
        return optax.apply_updates(p, u), moments

    r = np.random.default_rng(0)
    one = lambda: jnp.asarray(r.standard_normal(SHAPE), jnp.float32)
    p = [one() for _ in range(count)]
    x = jnp.asarray(r.standard_normal((8, SHAPE[0])), jnp.float32)
    return step, ((p, tx.init(p)), x)


def test_all_leaves_are_written_out_at_once(in_chunks, monkeypatch):
    """Not the whole step anew for each of them."""
    step, args = many()
    closed = flatten(jax.make_jaxpr(step)(*args))
    written, before = [], analysis._written_out
    monkeypatch.setattr(
        analysis, "_written_out", lambda *a: written.append(1) or before(*a)
    )
    ours = rewrite(closed, by_shape(closed, range(len(closed.in_avals) - 1)))
    assert len(written) == 1
    (found,) = [r for one, r in ours.records[0].rewrites if one.config is RowChunks]
    assert len(found) == 3
    got = jax.jit(lambda *xs: jaxprs.evaluate(ours.jaxpr, xs))(*jax.tree.leaves(args))
    want = jax.tree.leaves(jax.jit(step)(*args))
    for a, b in zip(got[:3], want[:3], strict=True):  # a step of a few roundings
        np.testing.assert_allclose(a, b, rtol=0, atol=8 * FLOAT32)


def test_left_alone_where_the_updates_are_read(in_chunks):
    """By a norm over all of them; and where the parameter is not donated."""
    assert found(EIGHT, watched=True)[0] == []
    assert found(EIGHT, donated=False)[0] == []


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100", "tpu-v5e"])
@pytest.mark.parametrize("how", [8, LowBit(8, code="dynamic"), 4], ids=str)
def test_temporaries_of_a_leaf(how, target):
    """At most half a byte a parameter beside the gradient, parameter included."""
    tx = adamw(1e-3, bits=how)

    def step(p, state, g):
        u, state = tx.update(g, state, p)
        return optax.apply_updates(p, u), state

    p = jax.ShapeDtypeStruct((30522, 1024), jnp.float32)
    args = p, jax.eval_shape(tx.init, p), p
    ours = jaxmem.schedule(step, donate_argnums=(0, 1))
    assert jaxmem.estimate(ours, *args, target=target).temp_bytes <= 0.5 * p.size
