"""Recipes run as users have it: with JAX's own promotion of dtypes and ranks."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def as_users_run_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
