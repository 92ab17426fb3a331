"""The private step in a budget is optax's own, its noise included."""

import jax
import numpy as np
import pytest

import jaxmem
from examples.recipes import dp_sgd as recipe

STEPS = 3


@pytest.fixture(scope="module")
def tx():
    return recipe.make_optimizer()


@pytest.fixture(scope="module")
def scheduled(tx):
    step = recipe.make_step(tx)
    how = {"donate_argnums": 0, "quick": True, "progress": False}
    return jaxmem.schedule(step, recipe.BUDGET, **how)


def test_values(tx, scheduled):
    want, losses = recipe.train(jax.jit(recipe.make_step(tx)), tx, STEPS)
    got, others = recipe.train(scheduled, tx, STEPS)
    np.testing.assert_allclose(others, losses, rtol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (got[0], want[0])), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    quiet = recipe.make_optimizer(noise=0.0)
    other, _ = recipe.train(jax.jit(recipe.make_step(quiet)), quiet, STEPS)
    pairs = zip(*map(jax.tree.leaves, (other[0], want[0])), strict=True)
    assert max(np.abs(a - b).max() for a, b in pairs) > 1e-3  # the noise counts


def test_gradients_of_all_examples_are_not_live(tx, scheduled):
    arguments = recipe.make_state(tx), next(recipe.batches())
    plan = scheduled.plan(*arguments)
    gradient = sum(x.nbytes for x in jax.tree.leaves(arguments[0][0]))
    assert plan.plain.peak_bytes > recipe.BATCH * gradient
    assert plan.budget_met and plan.scheduled.peak_bytes < plan.plain.peak_bytes / 8
