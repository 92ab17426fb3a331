"""optax.adam itself needs standard promotion: its bias correction is float ** int32."""

import jax
import pytest


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield
