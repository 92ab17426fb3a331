"""A Keras 3 model under `schedule`; they need the extra `foreign`."""

import jax
import numpy as np
import pytest

import jaxmem

# it names the backend before it imports keras, which reads that once
recipe = pytest.importorskip("examples.recipes.keras_jax")

pytestmark = [pytest.mark.slow, pytest.mark.foreign]
STEPS = 3


@pytest.fixture(scope="module")
def made():
    """A model, its step and the state that training starts with."""
    model = recipe.make_model()
    optimizer = recipe.keras.optimizers.AdamW(1e-3)
    state = recipe.make_state(model, optimizer)
    return model, recipe.make_step(model, optimizer), jax.device_get(state)


@pytest.fixture(scope="module")
def run(made):
    how = {"donate_argnums": 0, "quick": True, "progress": False}
    return jaxmem.schedule(made[1], recipe.BUDGET, **how)


def test_losses_and_the_trained_model(made, run):
    model, step, start = made
    _, want = recipe.train(jax.jit(step), start, STEPS)
    state, got = recipe.train(run, jax.device_put(start), STEPS)
    assert want[-1] < want[0]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    recipe.write_back(model, state)
    for variable, value in zip(model.trainable_variables, state[0], strict=True):
        np.testing.assert_array_equal(variable.value, value)


def test_bytes(made, run):
    tokens = np.zeros((recipe.BATCH, recipe.TOKENS + 1), np.int32)
    plan = run.plan(made[2], tokens)
    assert plan.budget_met and plan.scheduled.peak_bytes < 0.6 * plan.plain.peak_bytes
