"""A Grain loader with a scheduled step; they need the extra `foreign`."""

import jax
import numpy as np
import pytest

import jaxmem
from jaxmem.demo import data

pytest.importorskip("grain", reason="pip install '.[foreign]'")
recipe = pytest.importorskip("examples.recipes.grain_loader")

pytestmark = [pytest.mark.slow, pytest.mark.foreign]
STEPS = 3


@pytest.fixture(scope="module")
def text():
    return data.standard_library(1_000_000).train


@pytest.fixture(scope="module")
def run():
    how = {"donate_argnums": 0, "quick": True, "progress": False}
    return jaxmem.schedule(recipe.step, recipe.BUDGET, **how)


def test_losses_of_one_compiled_step(text, run):
    plain = jax.jit(recipe.step)
    _, want = recipe.train(
        plain, recipe.make_state(), recipe.make_batches(text), 2 * STEPS
    )
    batches = recipe.make_batches(text)
    state, first = recipe.train(run, recipe.make_state(), batches, STEPS)
    where = batches.get_state()

    again = recipe.make_batches(text)  # of a run that goes on
    again.set_state(where)
    _, then = recipe.train(run, state, again, STEPS)
    np.testing.assert_allclose(first + then, want, rtol=1e-5)


def test_batches_are_stretches_of_the_text_each_once(text):
    windows = recipe.Windows(text)
    count = len(windows) // recipe.BATCH
    batches = recipe.make_batches(text)
    found = np.concatenate([next(batches) for _ in range(count)])
    assert len(np.unique(found, axis=0)) >= 0.99 * len(found)  # some may be alike
    known = {windows[i].tobytes() for i in range(len(windows))}
    assert all(np.asarray(row).tobytes() in known for row in found)


def test_the_plan_of_a_shape_is_that_of_a_batch(text, run):
    shape = jax.ShapeDtypeStruct((recipe.BATCH, recipe.TOKENS + 1), np.int32)
    plan = run.plan(jax.eval_shape(recipe.make_state), shape)
    batch = next(recipe.make_batches(text))
    assert (batch.shape, batch.dtype) == (shape.shape, shape.dtype)
    assert plan.budget_met and plan.scheduled.peak_bytes < plan.plain.peak_bytes / 3
