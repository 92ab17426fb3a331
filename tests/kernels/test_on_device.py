"""The kernels on the GPU or TPU of this machine: JAX_PLATFORMS=cuda pytest -m device.

What `python -m benchmarks.device --only right` does, without processes of their own.
"""

import jax
import pytest

from benchmarks.device import right
from benchmarks.device.job import NotHere

LOOKS = right.looks()

pytestmark = pytest.mark.device


@pytest.fixture(autouse=True)
def on_a_device():
    if jax.default_backend() == "cpu":
        pytest.skip("no GPU or TPU; JAX_PLATFORMS names the one that is to be used")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("name", LOOKS)
def test_values_gradients_and_masks(name):
    """A result that is off raises an error, which says which."""
    try:
        assert all(row.get("right", True) for row in LOOKS[name].rows(False))
    except NotHere as reason:
        pytest.skip(str(reason))
