"""A stream of tiles through a ring of buffers, which several loops may share.

Each step's tiles are copied into the next slot of the ring while those before are in
use. A loop visits a part of the steps, and the copies go on from one loop to the next,
so that tiles that need a mask and tiles that do not have loops of their own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import STAGES, Named


class Span(NamedTuple):
    """The blocks from `first` to before `stop`, and whether their tiles need a mask."""

    first: Any
    stop: Any
    masked: bool


class Ring(NamedTuple):
    """Tiles on their way, of steps that are counted from `first` to before `stop`.

    Attributes:
      sources: by name, a function of the step to the reference that is copied.
      buffers: by name, `STAGES` tiles in shared memory.
      arrived: a barrier for each slot.
    """

    sources: dict[str, Callable]
    first: Any
    stop: Any
    buffers: Named
    arrived: Any

    def _slot(self, step):
        return lax.rem(step - self.first, np.int32(STAGES))

    def _copy(self, step) -> None:
        slot = self._slot(step)
        for x, source in self.sources.items():
            target, barrier = self.buffers[x].at[slot], self.arrived.at[slot]
            plgpu.copy_gmem_to_smem(source(step), target, barrier)

    def fill(self) -> None:
        """Starts the first copies."""
        stop = jnp.minimum(self.stop, self.first + np.int32(STAGES))
        lax.fori_loop(self.first, stop, lambda step, _: self._copy(step), None)

    def visit(self, loop: Span, body: Callable, carry):
        """The last `carry = body(step, tiles by name, carry)` of some steps.

        Calls must visit all steps, in their order.
        """

        def one(step, carry):
            slot = self._slot(step)
            plgpu.barrier_wait(self.arrived.at[slot])
            tiles = {x: buffer.at[slot] for x, buffer in self.buffers.items()}
            carry = body(step, tiles, carry)
            plgpu.commit_smem()  # all is read before the next copies overwrite it
            later = step + np.int32(STAGES)
            pl.when(later < self.stop)(lambda: self._copy(later))
            return carry

        return lax.fori_loop(*map(as_int32, loop[:2]), one, carry)


def with_ring(
    run: Callable, sources: dict[str, Callable], shapes: Named, first, stop
) -> None:
    """`run` of a ring that is filling, whose slots have these shapes and dtypes."""

    def scoped(buffers, arrived):
        ring = Ring(sources, *map(as_int32, (first, stop)), buffers, arrived)
        ring.fill()
        run(ring)

    pl.run_scoped(
        scoped,
        {x: plgpu.SMEM((STAGES, *s.shape), s.dtype) for x, s in shapes.items()},
        plgpu.Barrier(num_arrivals=len(sources), num_barriers=STAGES),
    )


def as_int32(x):
    """A Python number as an int32, anything else as it is."""
    return np.int32(x) if isinstance(x, int) else x
