"""What unrolled layers keep from one pass to the other, and what they need not."""

import math

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from benchmarks.models import written_out
from jaxmem.chips import rates_of
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import JaxprGraph, late_of
from jaxmem.scheduling import Choice
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling.recompute.between_passes import is_sum, kept_between
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.recompute.unrolled import Unrolled
from jaxmem.scheduling.recompute.unrolled_cut import (
    unrolled,
    unrolled_cut,
    unrolled_price,
    with_layer_inputs,
)

LAYERS, ROWS, WIDTH, WORDS = 3, 64, 128, 384


def layer(x, w):
    scores = (x @ w["q"]) @ (x @ w["k"]).T
    x = x + jax.nn.softmax(scores) @ x
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def loss(ws, x, labels):
    for w in ws["layers"]:
        x = layer(x, w)
    logits = jax.nn.log_softmax(x @ ws["head"])
    return -jnp.take_along_axis(logits, labels[:, None], 1).mean()


def step(ws, moments, x, labels):
    """Momentum, and gradients clipped by their norm."""
    value, grads = jax.value_and_grad(loss)(ws, x, labels)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    clipped = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, clipped)
    return value, jax.tree.map(lambda w, m: w - 0.1 * m, ws, moments), moments


def arguments():
    normal = lambda *shape: jax.random.normal(jax.random.key(0), shape) / 10
    shapes = {"q": WIDTH, "k": WIDTH, "up": 4 * WIDTH}
    one = {name: normal(WIDTH, size) for name, size in shapes.items()}
    one["down"] = normal(4 * WIDTH, WIDTH)
    ws = {"layers": [one] * LAYERS, "head": normal(WIDTH, WORDS)}
    labels = jnp.arange(ROWS, dtype=jnp.int32)
    return ws, jax.tree.map(jnp.zeros_like, ws), normal(ROWS, WIDTH), labels


@pytest.fixture(scope="module")
def program():
    return jax.make_jaxpr(step)(*arguments())


def test_what_an_update_makes_of_its_state_is_not_kept(program):
    graph = JaxprGraph(program)
    late = late_of(graph)
    count = len(jax.tree.leaves(arguments()[0]))
    moments = program.jaxpr.invars[count : 2 * count]
    early = {
        graph.eqns[i].outvars[0]
        for m in moments
        for i in graph.users[m]
        if i not in late
    }
    assert len(early) == count  # 0.9 * m waits for no gradient
    assert not early & set(kept_between(graph, late))


def test_what_the_loss_makes_for_its_own_gradient_is_not_kept(program):
    kept = kept_between(JaxprGraph(program), late_of(JaxprGraph(program)))
    assert all(v.aval.shape != (ROWS, WORDS) for v in kept)
    assert any(v.aval.shape == (ROWS, 4 * WIDTH) for v in kept)


def test_sums_are_kept_or_not_with_what_they_are_of(program):
    pair = unrolled(program)
    sums = [v for v in pair.slots.values() if is_sum(pair.body, v)]
    assert {v.aval.shape for v in sums} == {(ROWS, 1)}
    assert len(sums) >= LAYERS


def test_of_a_softmax_its_scores_are_kept(program):
    """XLA writes them anyway: kept, they cost no time."""
    pair = with_layer_inputs(unrolled(program))
    found = unrolled_cut(pair, math.inf, "tpu-v5e", reductions=True)
    kept = [v for v in found.variables if v.aval.shape == (ROWS, ROWS)]
    eqns = [pair.body.eqns[pair.body.maker[v]] for v in kept]
    assert len(eqns) == LAYERS and all(map(primitives.is_product, eqns))
    assert not any(is_sum(pair.body, v) for v in found.variables)


def test_what_products_read_again_is_not_free_on_a_gpu(program):
    """XLA:GPU writes the probabilities and the MLP's activations a second time."""
    pair = with_layer_inputs(unrolled(program))
    kept = unrolled_cut(pair, math.inf, "h100", reductions=True).variables
    names = [str(pair.body.eqns[pair.body.maker[v]].primitive) for v in kept]
    assert names.count("tanh") == LAYERS
    assert sum(v.aval.shape == (ROWS, ROWS) for v in kept) >= LAYERS
    seconds = unrolled_price(pair, 1.0, "h100")
    curve = pair.body.eqns[pair.body.maker[kept[names.index("tanh")]]]
    size = 4 * ROWS * 4 * WIDTH
    assert pair.priced(seconds)(curve) >= size / rates_of("h100").bandwidth


@pytest.mark.parametrize("rate", (math.inf, 1e-3))
def test_one_barrier_a_half_layer_and_none_in_the_update(program, rate):
    config = Unrolled(rate, reductions=True, layer_inputs=True)
    choice = Choice("h100", (Recompute(rate, reductions=True), config))
    made = rewrite(program, {}, None, choice)
    eqns = jaxprs.split(made.jaxpr)[0].eqns
    barriers = [e for e in eqns if primitives.is_barrier(e)]
    assert 0 < len(barriers) <= 2 * LAYERS + 1
    count = len(jax.tree.leaves(arguments()[0]))
    moments = set(made.jaxpr.jaxpr.invars[count : 2 * count])
    assert not any(v in moments for e in barriers for v in e.invars)


@pytest.mark.slow
def test_never_behind_a_policy_round_each_layer(tmp_path, monkeypatch):
    """A whole step of training, in the bytes of a policy and in no more time."""
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path))
    how = {"target": "h100", "donate_argnums": (0, 1)}
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        plain, args = written_out.training(4)
        stock = written_out.training(4, policy)
        theirs = jaxmem.estimate(stock[0], *stock[1], **how)
        plan = jaxmem.schedule(plain, theirs.peak_bytes, **how).plan(*args)
    assert plan.scheduled.peak_bytes <= theirs.peak_bytes
    assert plan.scheduled.seconds <= theirs.seconds
