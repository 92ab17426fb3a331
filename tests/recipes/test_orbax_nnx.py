"""A job that is stopped goes on in less memory as if it had not been."""

import shutil

import jax
import numpy as np
import pytest

from examples.recipes import orbax_nnx as recipe


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a job that was stopped after two of four steps, and its losses."""
    folder = tmp_path_factory.mktemp("stopped")
    return folder, recipe.train(folder, 2)[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return recipe.train(tmp_path_factory.mktemp("whole"), 4)


def test_under_another_plan(stopped, whole, tmp_path):
    """Up to rounding; the same random numbers were drawn."""
    shutil.copytree(stopped[0], tmp_path, dirs_exist_ok=True)
    losses, state, plan = recipe.train(tmp_path, 4, recipe.BUDGET)
    np.testing.assert_allclose(stopped[1] + losses, whole[0], rtol=1e-5)
    drawn = lambda state: jax.random.key_data(
        state[0]["blocks"]["dropout"]["rngs"]["key"].get_value()
    )
    np.testing.assert_array_equal(drawn(state), drawn(whole[1]))
    assert plan.budget_met and plan.scheduled.peak_bytes < plan.plain.peak_bytes / 3


@pytest.mark.slow
def test_under_the_same_plan(stopped, whole, tmp_path):
    """Every bit: of parameters, of codes and scales, of counts and keys."""
    shutil.copytree(stopped[0], tmp_path, dirs_exist_ok=True)
    losses, state, _ = recipe.train(tmp_path, 4)
    assert stopped[1] + losses == whole[0]
    assert jax.tree.structure(state) == jax.tree.structure(whole[1])
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    bits = lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x)
    for a, b in zip(*map(jax.tree.leaves, (state, whole[1])), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))
