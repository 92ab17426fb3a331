"""Diffrax under `schedule`, and the bytes of its adjoints: the extra `foreign`."""

import equinox as eqx
import numpy as np
import pytest

import jaxmem

pytest.importorskip("diffrax", reason="pip install '.[foreign]'")
recipe = pytest.importorskip("examples.recipes.neural_ode")

pytestmark = [pytest.mark.slow, pytest.mark.foreign]
DONATED = {"donate_argnums": (0, 1)}


@pytest.mark.parametrize("name", recipe.ADJOINTS)
def test_losses(name):
    step = recipe.make_step(recipe.ADJOINTS[name])
    _, want = recipe.train(eqx.filter_jit(step), 3)
    _, got = recipe.train(jaxmem.schedule(step, **DONATED), 3)
    assert want[-1] != want[0]
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_the_solution_is_that_of_shorter_steps(monkeypatch):
    start, end = recipe.batch(0)
    monkeypatch.setattr(recipe, "STEPS", 4 * recipe.STEPS)
    recipe.moved.clear_cache()
    # of fifth order: the error of these steps is below rounding
    np.testing.assert_allclose(recipe.moved(start), end, atol=1e-4)
    recipe.moved.clear_cache()


def test_checkpoints_keep_less_than_every_step():
    arguments = *recipe.make_state(), recipe.batch(0)
    every, few = (
        jaxmem.estimate(recipe.make_step(x), *arguments, **DONATED).temp_bytes
        for x in recipe.ADJOINTS.values()
    )
    hidden = 4 * recipe.BATCH * recipe.WIDTH  # a layer's values of one evaluation
    assert every - few > recipe.STEPS * hidden
