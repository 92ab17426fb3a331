"""Adam's update of one leaf, by XLA or by the kernel of a platform."""

import functools
from typing import Any

import jax

from pallas_kernels import adam, simulated_platform
from pallas_kernels.dispatch import Implementation, dispatch, kernel_module


def update_leaf(
    implementation: Implementation | None, old: dict[str, Any], factors, seed
) -> dict[str, Any]:
    """What changes of "p", "m" and "v"; `adam.update_leaf` has the arguments."""
    how = implementation, simulated_platform()
    return _jitted(*how)(old, factors, seed)


@functools.cache
def _jitted(implementation, simulated):
    """Leaves of one shape are traced and lowered once, a kernel takes a while."""
    del simulated  # what was traced outside of a simulation is not for inside

    def adam_leaf(*leaf):
        return dispatch(
            *("adam", implementation, *leaf),
            xla=adam.update_leaf,
            tpu=lambda *leaf: kernel_module("adam", "tpu").update(*leaf),
            gpu=lambda *leaf: kernel_module("adam", "gpu").update(*leaf),
            sized_by=leaf[0].get("p", leaf[0]["m"]),
        )

    return jax.jit(adam_leaf)
