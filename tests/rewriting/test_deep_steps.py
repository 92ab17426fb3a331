"""Formulas in long steps: looked for in a time that grows as the step does.

What is counted are the goals that the matcher follows, whatever the machine is busy
with.
"""

import inspect
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxmem.rewriting import LIBRARY, _goals, _match_inputs, find

X, W = jnp.ones((4, 8)), jnp.ones((1, 8))
SHORT = 40  # longer than any formula is deep
LONG = 1100  # operations, more than the stack has frames


def squares(h, i):
    return h**2 * 0.9


def own_numbers(h, i):
    """No two layers are alike, so that none tells what another is."""
    return h * h * (0.9 + i / 1000)


def polynomial(h, i):
    return h + (0.1 + i / 1000) * h * h * h


def gates(h, i):
    return h * (1 + jnp.tanh(h * (0.1 + i / 1000)))


def mixed(h, i):
    product = h.astype(jnp.bfloat16) * W.astype(jnp.bfloat16)
    return product.astype(jnp.float32) * (0.9 + i / 1000)


def casts(h, i):
    return h.astype(jnp.bfloat16).astype(jnp.float32)


def views(h, i):
    return h.reshape(-1).reshape(h.shape)


def step_of(layer, layers: int):
    def loss(w):
        h = X * w
        for i in range(layers):
            h = layer(h, i)
        return jnp.sum(h)

    return lambda w: w - 0.1 * jax.grad(loss)(w)


@pytest.fixture
def goals(monkeypatch):
    """Of a function, how many goals are followed in a search for formulas."""
    followed = []
    before = _goals._before
    counted = lambda *args: followed.append(1) or before(*args)
    monkeypatch.setattr(_goals, "_before", counted)

    def count(fn, *args) -> int:
        followed.clear()
        find(fn, *args)
        return len(followed)

    return count


SLOW = [pytest.param(f, marks=pytest.mark.slow) for f in (polynomial, gates)]


@pytest.mark.parametrize("layer", [squares, own_numbers, mixed, *SLOW])
def test_goals_grow_as_the_step(goals, layer):
    once, twice = (goals(step_of(layer, n), W) for n in (SHORT, 2 * SHORT))
    equations = len(jax.make_jaxpr(step_of(layer, SHORT))(W).eqns)
    assert 0 < once < equations * len(LIBRARY)  # less than one a pattern and place
    assert twice < 2.2 * once  # at the start fewer are looked at


@pytest.mark.parametrize("layer", [casts, views])
def test_views_of_views_are_looked_through_once(layer, monkeypatch):
    """However many there are, behind the last operation of a formula."""
    looked = []
    through = _match_inputs.look_through

    def counted(*args):
        for seen in through(*args):
            looked.append(1)
            yield seen

    monkeypatch.setattr(_match_inputs, "look_through", counted)

    def count(layers: int) -> int:
        looked.clear()
        find(lambda x: step_of_views(layer, layers, x), X)
        return len(looked)

    once, twice = count(2 * SHORT), count(4 * SHORT)
    assert 0 < once
    assert twice < 2.2 * once


def step_of_views(layer, layers: int, x):
    h = x @ x.T
    for i in range(layers):
        h = layer(h, i)
    return h


def test_a_formula_of_a_long_product_is_found():
    def gelu_of_chain(x):
        for i in range(SHORT):
            x = own_numbers(x, i)
        return jax.nn.gelu(x, approximate=False)

    assert find(gelu_of_chain, X).counts == {"gelu": 1}


def test_terms_of_a_sum_may_be_many():
    """Hundreds of masks and biases are one argument of attention."""
    q = jnp.ones((2, 16, 2, 8))
    bias = jnp.ones((2, 2, 16, 16))

    def attention(q):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, q) / 8**0.5
        for _ in range(300):
            scores = scores + bias
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), q)

    assert set(find(attention, q).counts) == {"dot_product_attention"}


def test_chains_are_deeper_than_the_stack():
    closed = jax.make_jaxpr(step_of(mixed, LONG // 4))(W)
    fn = lambda w: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, w)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 200)
    try:
        report = find(fn, W)
    finally:
        sys.setrecursionlimit(limit)
    assert len(closed.jaxpr.eqns) > LONG
    assert report.counts == {}
