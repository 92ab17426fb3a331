"""What `benchmarks.placement` sends to the host's memory: enough, and to no effect."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import placement
from jaxmem.ir.jaxprs import evaluate
from jaxmem.ir.scans import is_on_host, kept_size
from jaxmem.scheduling.recompute.pairs import pairs

LAYERS, ROWS, WIDTH, HIDDEN = 3, 8, 16, 64


def gradient(params, x):
    def layer(x, p):
        return x + jnp.tanh(jnp.sin(x @ p["up"])) @ p["down"], None

    return jax.grad(lambda p: jax.lax.scan(layer, x, p)[0].sum())(params)


@pytest.fixture(scope="module")
def kept():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": jax.random.normal(keys[0], (LAYERS, WIDTH, HIDDEN)) / 8,
        "down": jax.random.normal(keys[1], (LAYERS, HIDDEN, WIDTH)) / 8,
    }
    args = params, jax.random.normal(keys[2], (ROWS, WIDTH))
    closed = jax.make_jaxpr(gradient)(*args)
    (pair,) = pairs(closed)
    return placement.Kept(closed, pair, args)


def test_a_placement_has_each_array_once(kept):
    orders = {rule: order(kept) for rule, order in placement.ORDERS.items()}
    assert all(set(order) == set(kept.arrays) for order in orders.values())
    assert all(len(order) == len(kept.arrays) for order in orders.values())
    sizes = [kept_size(v) for v in orders["largest first"]]
    assert sizes == sorted(sizes, reverse=True)
    assert len({tuple(map(id, order)) for order in orders.values()}) > 2


@pytest.mark.parametrize("rule", placement.ORDERS)
@pytest.mark.parametrize("count", [1, 2])
def test_what_is_sent_is_on_the_host_and_changes_nothing(kept, rule, count):
    sent = placement.ORDERS[rule](kept)[:count]
    closed = kept.sending(sent)
    forward = next(e for e in closed.eqns if e.primitive.name == "scan")
    away = [v for v in forward.outvars if is_on_host(v)]
    sizes = sorted(v.aval.size * v.aval.dtype.itemsize for v in away)
    assert sizes == sorted(LAYERS * kept_size(v) for v in sent)
    flat = jax.tree.leaves(kept.args)
    for got, want in zip(
        jax.jit(lambda *xs: evaluate(closed, xs))(*flat),
        jax.tree.leaves(jax.jit(gradient)(*kept.args)),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


def test_as_many_are_sent_as_have_the_bytes(kept):
    order = placement.ORDERS["largest first"](kept)
    first, second = (LAYERS * kept_size(v) for v in order[:2])
    assert placement.enough(order, LAYERS, first) == 1
    assert placement.enough(order, LAYERS, first + 1) == 2
    assert placement.enough(order, LAYERS, first + second + 1) > 2
    assert placement.enough(order, LAYERS, 1e18) == len(order)
