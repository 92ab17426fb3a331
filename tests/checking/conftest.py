"""Promotion of dtypes as users have it: optax needs it."""

import jax
import pytest


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield
