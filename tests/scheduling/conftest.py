"""float64, where an operation moved is told from one changed, and optax's promotion.

optax.adam itself needs standard promotion: its bias correction is float ** int32.
"""

import jax
import pytest


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield
