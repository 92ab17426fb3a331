"""Products that make much wait for those that free much: which, values, and bytes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from benchmarks.blocks import gradient_of_stack
from benchmarks.models.transformers import LLAMA_1B, LlamaLayer, Stack
from jaxmem.ir import jaxprs
from jaxmem.ir.graph import JaxprGraph, by_shape
from jaxmem.ir.scans import size_of
from jaxmem.memory import estimate
from jaxmem.scheduling import Choice
from jaxmem.scheduling._pass import Level
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling.order.shrink_first import (
    ProductsThatShrinkFirst,
    ShrinkFirst,
    _before,
    _waits,
)
from jaxmem.scheduling.recompute.residuals import Recompute
from tests.scheduling.test_scan_residuals import same_bits, scans
from tests.sets import some_fast

L, B, S, N, H = 3, 2, 512, 4, 16  # 4 MiB of bfloat16 probabilities
WIDTH = N * H


def layer(x, w):
    heads = (x @ w).reshape(B, S, 3, N, H)
    q, k, v = (heads[:, :, i] for i in range(3))
    logits = jnp.einsum("bqnh,bknh->bnqk", q, k, preferred_element_type=jnp.float32)
    p = jax.nn.softmax(logits / 4.0).astype(x.dtype)
    return x + jnp.einsum("bnqk,bknh->bqnh", p, v).reshape(x.shape), None


def loss(w, x):
    x, _ = jax.lax.scan(layer, x, w)
    return jnp.sum(x.astype(jnp.float32) ** 2)


def problem():
    keys = jax.random.split(jax.random.key(0), 2)
    w = jax.random.normal(keys[0], (L, WIDTH, 3 * WIDTH), jnp.bfloat16) / 8
    return jax.grad(loss), (w, jax.random.normal(keys[1], (B, S, WIDTH), jnp.bfloat16))


def made(rate=None, waits=True):
    fn, args = problem()
    closed = jax.make_jaxpr(fn)(*args)
    choice = Choice("h100", (Recompute(rate), ShrinkFirst(waits)))
    return rewrite(closed, by_shape(closed, ()), None, choice), args


def barriers(eqn) -> int:
    names = [e.primitive.name for e in jaxprs.walk(eqn.params["jaxpr"])]
    return names.count("optimization_barrier")


@pytest.mark.parametrize("rate", [None, 1e-3])
def test_the_gradient_of_probabilities_waits_for_that_of_values(rate):
    plain, _ = made(rate, waits=False)
    found, _ = made(rate)
    assert found.did(ShrinkFirst) and not plain.did(ShrinkFirst)
    before, after = (list(map(barriers, scans(x.jaxpr))) for x in (plain, found))
    # in the backward scan alone: two products read the gradient of the output
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, 1]


@pytest.mark.parametrize("rate", some_fast([None, 1e-3], 1e-3))
def test_values_are_the_same(rate):
    plain, args = made(rate, waits=False)
    found, _ = made(rate)
    same_bits(plain.jaxpr, found.jaxpr, jax.tree.leaves(args))


def test_nothing_waits_where_nothing_grows():
    def loss(w, x):
        iteration = lambda x, w: (jnp.tanh(x @ w), None)
        return jnp.sum(jax.lax.scan(iteration, x, w)[0])

    closed = jax.make_jaxpr(jax.grad(loss))(jnp.ones((L, 64, 64)), jnp.ones((8192, 64)))
    found = ProductsThatShrinkFirst().analyse(Level(closed, {}), ShrinkFirst(True))
    assert list(found) == []


def test_what_waits_is_never_needed_before():
    """For products that read each other's results, in every direction."""

    def body(x, a, b):  # x [n, n]; a, b [n, 1]: x @ a is small, a @ b' large
        small = x @ a
        large = small @ b.T
        repeated = large @ a
        return large, repeated, (repeated @ b.T) @ a, a @ b.T, x @ b

    n = 1024
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((n, n), (n, 1), (n, 1))]
    graph = JaxprGraph(jax.make_jaxpr(body)(*shapes))
    waits = _waits(graph, size_of)
    assert waits
    for i, first in waits.items():
        assert i not in _before(graph, first, waits)


def llama():
    """Two small layers of Llama: grouped queries, a causal mask, rotations."""
    config = replace(LLAMA_1B, layers=2, width=128, heads=4, kv_heads=2, hidden=256)
    return gradient_of_stack(Stack(config, LlamaLayer), (1, 1024))


def peak(rate, waits: bool) -> int:
    fn, args = llama()
    found = rewrite(
        jax.make_jaxpr(fn)(*args),
        {},
        None,
        Choice("h100", (Recompute(rate), ShrinkFirst(waits))),
    )
    step = lambda *args: jaxprs.evaluate(found.jaxpr, list(jax.tree.leaves(args)))
    return estimate(step, *args, target="h100").peak_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("standard_jax")
def test_the_peak_falls():
    assert peak(1e13, True) < 0.75 * peak(1e13, False)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_jax")
def test_a_search_takes_it_where_nothing_else_fits():
    most, least = (peak(None, waits) for waits in (False, True))
    fn, args = llama()
    step = jaxmem.schedule(fn, (most + least) // 2, target="h100", donate_argnums=())
    plan = step.plan(*args)
    assert plan.choice.get(ShrinkFirst).enabled and not plan.recomputed
    assert plan.barriers
    assert plan.scheduled is not None and plan.scheduled.peak_bytes == least
