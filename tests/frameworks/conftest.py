"""Steps as users write them, with the promotion that users have."""

import jax
import pytest


@pytest.fixture
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
