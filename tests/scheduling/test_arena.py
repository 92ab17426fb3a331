"""Plans run in one flat arena: the step's own bits, or the plan is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.ir import jaxprs
from jaxmem.planning import peak
from tests.scheduling.arena import Places, places_of, run_in_arena
from tests.scheduling.problem import array
from tests.scheduling.test_operations import (
    any_order,
    assert_bits,
    operations,
    prepared,
)
from tests.sets import some_fast


@pytest.mark.parametrize("name", some_fast(["mlp", "block"], "mlp"))
def test_planned_steps_give_their_own_bits(name):
    ops, leaves, want = prepared(name)
    program = range(len(ops.graph.operations))
    for order in (program, any_order(ops.graph, 1)):
        places = places_of(ops.graph, order)
        assert places.size < 1.05 * peak(ops.graph, order)
        assert_bits(run_in_arena(ops, leaves, order, places), want)


def test_loops_branches_and_barriers_run_in_an_arena():
    def step(state, x, key):
        w, count = state

        def body(x, w):
            y = jnp.tanh(x @ w)
            return y, jnp.sum(y)

        y, sums = jax.lax.scan(body, x, w)
        y, sums = jax.lax.optimization_barrier((y, sums))
        noise = jax.random.key_data(key)[0].astype(y.dtype)
        y = jax.lax.cond(count > 2, lambda y: y * 2, lambda y: y + 1, y + noise)
        return (w - jnp.mean(sums), count + 1), y

    state = array(3, 8, 8, dtype=jnp.float32), jnp.int32(3)
    args = state, array(8, 8, dtype=jnp.float32), jax.random.key(3)
    ops, leaves = operations(step, *args, donate=1), jax.tree.leaves(args)
    order = range(len(ops.graph.operations))
    got = run_in_arena(ops, leaves, order, places_of(ops.graph, order))
    assert_bits(got, jaxprs.evaluate(jaxprs.trace(step, *args).jaxpr, leaves))


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_value_freed_too_early_shows(seed):
    """Two values alive together, laid one over the other: the results differ."""
    ops, leaves, want = prepared("mlp")
    graph = ops.graph
    order = range(len(graph.operations))
    good = places_of(graph, order)
    last = {v: max(r, default=-1) for v, r in enumerate(graph.readers)}
    pairs = [
        (u, v)
        for v, i in graph.maker.items()
        for u, j in graph.maker.items()
        if j < i < last[u]
        and {u, v} <= good.values.keys()
        and graph.values[u].bytes > 4
    ]
    u, v = pairs[seed % len(pairs)]
    bad = Places(good.size, {**good.values, v: good.values[u]}, good.scratch)
    with np.errstate(all="ignore"):
        got = run_in_arena(ops, leaves, order, bad)
    with pytest.raises(AssertionError):
        assert_bits(got, want)


def test_a_place_outside_of_the_arena_is_refused():
    ops, leaves, _ = prepared("mlp")
    order = range(len(ops.graph.operations))
    good = places_of(ops.graph, order)
    with pytest.raises(ValueError, match="outside of an arena of 16"):
        run_in_arena(ops, leaves, order, Places(16, good.values, good.scratch))
    with pytest.raises(ValueError, match="order"):
        run_in_arena(ops, leaves, [0], good)
