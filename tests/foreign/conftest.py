"""Promotion as users have it: these libraries mix dtypes and ranks."""

import jax
import pytest


@pytest.fixture(autouse=True)
def standard_jax():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
