"""Replay through time: a recurrent net's steps run again, a segment at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from benchmarks.headline.replay import lstm_step

pytestmark = pytest.mark.usefixtures("standard_jax")  # the step is a user's
MIB = 2**20
TIME, BATCH, WIDTH = 64, 16, 32


def filled(args):
    """Weights that keep gates open, and a random sequence."""
    (weights, moments), xs = args
    keys = iter(jax.random.split(jax.random.key(0), 4))
    draw = lambda x: jax.random.normal(next(keys), x.shape) / WIDTH**0.5
    weights = jax.tree.map(draw, weights)
    del moments
    return (weights, optax.adam(1e-3).init(weights)), draw(xs)


def losses(step, args, count=4):
    """Of some steps of training, and the weights after them."""
    state, xs = args
    found = []
    for _ in range(count):
        state, loss = step(state, xs)
        found.append(float(loss))
    return found, state[0]


@pytest.mark.slow
def test_an_lstm_under_a_budget_trains_as_the_plain_one():
    step, args = lstm_step(TIME, BATCH, WIDTH)
    plain = jaxmem.estimate(step, *args, target="cpu")
    budget = plain.peak_bytes // 3
    scheduled = jaxmem.schedule(step, budget, target="cpu", donate_argnums=())
    plan = scheduled.plan(*args)
    assert plan.scheduled.peak_bytes <= budget
    want, weights = losses(jax.jit(step), filled(args))
    got, trained = losses(scheduled, filled(args))
    assert want[-1] < want[0]
    # one product of sums in another order a step of time, in float32
    tolerance = TIME * np.finfo(np.float32).eps
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
    # Adam divides by the gradient's size: a step is 1e-3, whatever that rounds to
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=4e-3)
    jax.tree.map(close, trained, weights)
    same = jax.tree.map(lambda a, b: jnp.mean(jnp.abs(a - b)), trained, weights)
    assert max(map(float, jax.tree.leaves(same))) < 1e-5


@pytest.mark.slow
def test_four_thousand_steps_fit_a_tenth_of_their_bytes():
    step, args = lstm_step()
    how = {"target": "h100", "donate_argnums": 0}
    plan = jaxmem.schedule(step, "620MiB", **how).plan(*args)
    assert plan.plain.peak_bytes > 7000 * MIB
    assert plan.scheduled.peak_bytes <= 620 * MIB
    assert plan.recomputed_flops > 0
