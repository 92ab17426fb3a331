"""These libraries mix dtypes and ranks, and give arrays of numpy."""

import jax
import pytest


@pytest.fixture(autouse=True)
def as_users_have_it(untyped):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
