"""Eight host devices and strict promotion, set before the first array exists.

The tests compile thousands of small programs and run each for a moment: what LLVM would
spend on making them fast, a third to a half of the suite's time, is left out.
"""

import os

_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_backend_optimization_level=0",
)
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS])
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def untyped():
    """Public functions as users call them: without the tests' type checker in front."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
