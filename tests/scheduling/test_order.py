"""Unrolled layers: a barrier after each large update that more gradients follow."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem import schedule
from jaxmem.ir import jaxprs
from jaxmem.scheduling._passes import rewrite
from tests.scheduling.problem import array, assert_close, copy

WIDE = 512  # a square matrix of float32 has a MiB
LAYERS = 4
LR = 0.1


def matrices(width=WIDE, n=LAYERS):
    scale = width**-0.5
    return [
        array(width, width, seed=i, scale=scale, dtype=jnp.float32) for i in range(n)
    ]


def loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def momentum(params, state, x):
    """Momentum by hand: strict promotion."""
    value, grads = jax.value_and_grad(loss)(params, x)
    state = jax.tree.map(lambda m, g: 0.9 * m + g, state, grads)
    return jax.tree.map(lambda p, m: p - LR * m, params, state), state, value


def arguments(width=WIDE, n=LAYERS):
    params = matrices(width, n)
    state = jax.tree.map(lambda p: 0.01 * jnp.cos(p), params)
    return params, state, array(2, width, seed=9, dtype=jnp.float32)


def barriers(jaxpr) -> list:
    eqns = jaxprs.split(jaxpr)[0].eqns
    return [e for e in eqns if e.primitive.name == "optimization_barrier"]


def scheduled_jaxpr(step, *args):
    return schedule(step, donate_argnums=(0, 1)).trace(*args).jaxpr


def test_a_barrier_after_each_update_but_the_last():
    found = barriers(scheduled_jaxpr(momentum, *arguments()))
    assert len(found) == LAYERS - 1
    for eqn in found:  # new parameter, new momentum, what flows on to the next layer
        assert sum(v.aval.shape == (WIDE, WIDE) for v in eqn.invars) >= 2
        assert any(v.aval.shape[:1] == (2,) for v in eqn.invars)


def test_updates_come_in_the_order_of_the_gradients():
    """Between one barrier and the next there is one layer's weight gradient."""
    jaxpr = scheduled_jaxpr(momentum, *arguments())
    products, between = [], 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            between += eqn.outvars[0].aval.shape == (WIDE, WIDE)
        if eqn.primitive.name == "optimization_barrier":
            products.append(between)
            between = 0
    assert [*products, between] == [1] * LAYERS


def test_the_results_are_the_same():
    args = arguments()
    want = jax.jit(momentum)(*args)
    got = schedule(momentum, donate_argnums=(0, 1))(*copy(args))
    # products of 512 terms, in another order
    assert_close(got, want, rtol=512 * 2.0**-24)


def test_nothing_for_small_parameters():
    assert barriers(scheduled_jaxpr(momentum, *arguments(64))) == []


def test_nothing_for_a_single_parameter():
    assert barriers(scheduled_jaxpr(momentum, *arguments(n=1))) == []


def test_nothing_where_nothing_is_updated():
    closed = jax.make_jaxpr(jax.grad(loss))(matrices(), arguments()[2])
    assert barriers(rewrite(closed, {}).jaxpr) == []


def test_an_optax_optimizer():
    """adam: three new arrays a layer, one barrier."""
    tx = optax.adam(LR)

    def step(params, state, x):
        updates, state = tx.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    with jax.numpy_dtype_promotion("standard"):
        params, _, x = arguments()
        jaxpr = scheduled_jaxpr(step, params, tx.init(params), x)
    found = barriers(jaxpr)
    assert len(found) == LAYERS - 1
    for eqn in found:
        assert sum(v.aval.shape == (WIDE, WIDE) for v in eqn.invars) >= 3


def test_clipping_holds_all_updates_up():
    """No update can be done before the last gradient: a barrier would gain nothing."""

    def step(params, state, x):
        grads = jax.grad(loss)(params, x)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
        return [p - LR * g / norm for p, g in zip(params, grads, strict=True)], state

    args = arguments()
    assert barriers(scheduled_jaxpr(step, *args)) == []
    want = jax.jit(step)(*args)
    got = schedule(step, donate_argnums=(0, 1))(*copy(args))
    assert_close(got, want, rtol=512 * 2.0**-24)


def test_remat_has_barriers_of_its_own():
    """Those of `jax.checkpoint` stay; ours come on top."""

    def remat(params, x):
        for w in params:
            x = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w)
        return jnp.mean(x**2)

    def step(params, state, x):
        grads = jax.grad(remat)(params, x)
        state = jax.tree.map(lambda m, g: 0.9 * m + g, state, grads)
        return jax.tree.map(lambda p, m: p - LR * m, params, state), state

    args = arguments()
    want = jax.jit(step)(*args)
    got = schedule(step, donate_argnums=(0, 1))(*copy(args))
    assert_close(got, want, rtol=512 * 2.0**-24)
    assert len(barriers(scheduled_jaxpr(step, *args))) >= LAYERS - 1


@pytest.mark.parametrize("donate", [(), (0,)])
def test_fewer_donated(donate):
    """Without any, every output is taken for what may be in an input's memory."""
    args = arguments()
    got = schedule(momentum, donate_argnums=donate)(*copy(args))
    want = jax.jit(momentum)(*args)
    assert_close(got, want, rtol=512 * 2.0**-24)
    assert np.isfinite(got[2])
