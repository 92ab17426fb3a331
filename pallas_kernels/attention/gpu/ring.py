"""A stream of tiles through a ring of buffers, which several loops may share.

Each step's tiles are copied into the next slot of the ring while those before are in
use. A loop visits a part of the steps, and the copies go on from one loop to the next,
so that tiles that need a mask and tiles that do not have loops of their own. Two
warpgroups that share a stream leave the copies to a third one, which gives them its
registers; one alone starts them itself.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import Named

STAGES = 2  # tiles of a stream that are in use or on their way
# Of a thread, where 128 copy and 256 read: 64 Ki of them are there, in multiples of 8.
COPIER_REGISTERS, READER_REGISTERS = 24, 240


class Span(NamedTuple):
    """The blocks from `first` to before `stop`, and whether their tiles need a mask."""

    first: Any
    stop: Any
    masked: bool


class Ring(NamedTuple):
    """Tiles on their way, of steps that are counted from `first` to before `stop`.

    Attributes:
      sources: by name, a function of the step to the reference that is copied.
      place: of a step, what the sources take in its stead; None for the step.
      buffers: by name, a tile in shared memory for each slot.
      arrived: a barrier for each slot.
      read: another, at which each of several warpgroups arrives; None if there is one.
    """

    sources: dict[str, Callable]
    first: Any
    stop: Any
    buffers: Named
    arrived: Any
    read: Any = None
    place: Callable | None = None

    @property
    def slots(self):
        return np.int32(next(iter(self.buffers.values())).shape[0])

    def _slot(self, step):
        return lax.rem(step - self.first, self.slots)

    def _copy(self, step) -> None:
        slot = self._slot(step)
        place = step if self.place is None else self.place(step)
        for x, source in self.sources.items():
            target, barrier = self.buffers[x].at[slot], self.arrived.at[slot]
            plgpu.copy_gmem_to_smem(source(place), target, barrier)

    def _copy_over(self, step) -> None:
        """Starts the next copy into the slot of a step whose tiles are read."""
        later = step + self.slots
        pl.when(later < self.stop)(lambda: self._copy(later))

    def fill(self) -> None:
        """Starts the first copies."""
        stop = jnp.minimum(self.stop, self.first + self.slots)
        _for_each(self.first, stop, self._copy)

    def feed(self) -> None:
        """Starts all copies, for the warpgroups that read."""
        self.fill()

        def over(step):
            plgpu.barrier_wait(self.read.at[self._slot(step)])
            self._copy_over(step)

        _for_each(self.first, self.stop, over)

    def visit(self, loop: Span, body: Callable, carry):
        """The last `carry = body(step, tiles by name, carry)` of some steps.

        Calls must visit all steps, in their order.
        """

        def one(step, carry):
            slot = self._slot(step)
            plgpu.barrier_wait(self.arrived.at[slot])
            tiles = {x: buffer.at[slot] for x, buffer in self.buffers.items()}
            carry = body(step, tiles, carry)
            plgpu.commit_smem()
            if self.read is not None:
                plgpu.barrier_arrive(self.read.at[slot])
            else:
                self._copy_over(step)
            return carry

        return lax.fori_loop(as_int32(loop.first), as_int32(loop.stop), one, carry)


def _for_each(first, stop, run: Callable) -> None:
    lax.fori_loop(first, stop, lambda step, _: run(step), None)


def with_ring(
    run: Callable,
    sources: dict[str, Callable],
    shapes: Named,
    first,
    stop,
    warpgroups: int,
    place: Callable | None = None,
) -> None:
    """`run` of a ring that is filling, whose slots have these shapes and dtypes.

    In each of the warpgroups that read; where there are two, a third one copies.
    """
    alone = warpgroups == 1
    slots = STAGES if alone else 2 * STAGES  # two warpgroups read at their own pace

    def scoped(buffers, arrived, read=None):
        steps = {"first": as_int32(first), "stop": as_int32(stop), "place": place}
        ring = Ring(sources, **steps, buffers=buffers, arrived=arrived, read=read)
        if alone:
            ring.fill()
            return run(ring)

        def copying():
            plgpu.set_max_registers(COPIER_REGISTERS, action="decrease")
            ring.feed()

        def reading():
            plgpu.set_max_registers(READER_REGISTERS, action="increase")
            run(ring)

        copies = lax.axis_index("warpgroup") == warpgroups
        pl.when(copies)(copying)
        pl.when(jnp.logical_not(copies))(reading)

    shared = (
        {x: plgpu.SMEM((slots, *s.shape), s.dtype) for x, s in shapes.items()},
        plgpu.Barrier(num_arrivals=len(sources), num_barriers=slots),
    )
    if alone:
        pl.run_scoped(scoped, *shared)
    else:
        read = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=slots)
        pl.run_scoped(scoped, *shared, read, collective_axes=("warpgroup",))


def as_int32(x):
    """A Python number as an int32, anything else as it is."""
    return np.int32(x) if isinstance(x, int) else x
