"""The average is that of the parameters, and lies where it was."""

import jax
import numpy as np
import pytest

import jaxmem
from examples.recipes import ema as recipe

STEPS = 4
TOKENS = np.zeros((recipe.BATCH, recipe.TOKENS + 1), np.int32)


@pytest.fixture(scope="module")
def state():
    return recipe.make_state()


def test_the_average_of_the_plain_steps_parameters(state):
    """By its definition, from what steps without donation leave."""
    average, seen, plain = state.params, [], jax.jit(recipe.step)

    def keep(state, tokens):
        state, loss = plain(state, tokens)
        seen.append(state.params)
        return state, loss

    _, losses = recipe.train(keep, STEPS)
    new = lambda e, p: recipe.DECAY * e + (1 - recipe.DECAY) * p
    for params in seen:
        average = jax.tree.map(new, average, params)
    run = jaxmem.schedule(recipe.step, donate_argnums=0)
    got, others = recipe.train(run, STEPS)
    np.testing.assert_allclose(others, losses, rtol=1e-5)
    # Adam's first steps are as long as the rate, whatever the gradient's rounding
    for a, b in zip(*map(jax.tree.leaves, (got.average, average)), strict=True):
        np.testing.assert_allclose(a, b, atol=STEPS * 1e-3 * (1 - recipe.DECAY))


def test_all_of_the_state_is_updated_in_place(state):
    run = jaxmem.schedule(recipe.step, donate_argnums=0)
    size = 4 * sum(x.nbytes for x in jax.tree.leaves(state.params))  # and moments
    kept = jaxmem.estimate(recipe.step, state, TOKENS)
    donated = jaxmem.estimate(run, state, TOKENS)
    assert kept.alias_bytes == 0 and donated.alias_bytes >= size
    assert donated.peak_bytes < kept.peak_bytes - size / 2


def test_an_average_that_is_the_parameters_is_refused(state):
    same = state.replace(average=state.params)
    with pytest.raises(ValueError, match="one and the same array"):
        jaxmem.schedule(recipe.step, donate_argnums=0)(same, TOKENS)
