"""Ping-pong scheduling: of two warpgroups one multiplies, the other exponentiates.

Left alone they may do the same at the same time. The second one starts half a step
later, and both wait for each other twice a step, where they change (Shah et al.,
"FlashAttention-3" (2024), section 3.1).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class PingPong(NamedTuple):
    """Of this warpgroup; `barrier` is None if it is alone, and nothing is waited for.

    Both warpgroups must make the same steps, of two changes each.
    """

    barrier: Any = None

    def change(self) -> None:
        """Waits until the other warpgroup changes."""
        if self.barrier is not None:
            plgpu.barrier_arrive(self.barrier)
            plgpu.barrier_wait(self.barrier)

    def change_after(self, *values) -> Any:
        """`values`, which are computed before the change."""
        if self.barrier is not None:
            values = lax.optimization_barrier(values)
        self.change()
        return values

    def run(self, steps: Callable[[], Any]) -> Any:
        """`steps()`, the second warpgroup's after the first change of the first."""
        if self.barrier is None:
            return steps()
        mine = lax.axis_index("warpgroup")
        pl.when(mine == 1)(self.change)
        results = steps()
        pl.when(mine == 0)(self.change)
        return results
