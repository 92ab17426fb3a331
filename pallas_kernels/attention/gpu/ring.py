"""A stream of tiles through a ring of buffers, which several loops may share.

Each step's tiles are copied into the next slot of the ring while those before are in
use. A loop visits a part of the steps, and the copies go on from one loop to the next,
so that tiles that need a mask and tiles that do not have loops of their own. Two
warpgroups that share a stream leave the copies to a third one, which gives them its
registers; one alone starts them itself.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.gpu.grid import Grid
from pallas_kernels.gpu import Named

STAGES = 2  # tiles of a stream that are in use or on their way
# Of two warpgroups, which read at their own pace, as many as have room.
MOST_STAGES, ROOM = 4, 144 * 2**10
# Of a thread, where 128 copy and 256 read: 64 Ki of them are there, in multiples of 8.
COPIER_REGISTERS, READER_REGISTERS = 24, 240


class Span(NamedTuple):
    """The blocks from `first` to before `stop`, and whether their tiles need a mask."""

    first: Any
    stop: Any
    masked: bool


class Stream(NamedTuple):
    """What passes through a ring for one block.

    Attributes:
      sources: by name, a function of the step to the reference that is copied, or of
        the step and the warpgroup that reads it.
      first, stop: of the steps, int32 or an int.
      read: function of the ring, which visits all steps.
      place: of a step, what the sources take in its stead; None for the step.
    """

    sources: dict[str, Callable]
    first: Any
    stop: Any
    read: Callable
    place: Callable | None = None


class Ring(NamedTuple):
    """Tiles of a stream on their way.

    Attributes:
      own: the names of the tiles of which each warpgroup has its own.
      buffers: by name, a tile in shared memory for each slot, or for each slot and
        warpgroup.
      arrived: a barrier for each slot.
      used: another, at which each of several warpgroups arrives; None if there is one.
    """

    stream: Stream
    own: tuple[str, ...]
    buffers: Named
    arrived: Any
    used: Any = None

    @property
    def first(self):
        return as_int32(self.stream.first)

    @property
    def stop(self):
        return as_int32(self.stream.stop)

    @property
    def slots(self):
        return np.int32(next(iter(self.buffers.values())).shape[0])

    def _slot(self, step):
        return lax.rem(step - self.first, self.slots)

    def _copy(self, step) -> None:
        slot = self._slot(step)
        place = step if self.stream.place is None else self.stream.place(step)
        for x, source in self.stream.sources.items():
            target, barrier = self.buffers[x].at[slot], self.arrived.at[slot]
            if x not in self.own:
                plgpu.copy_gmem_to_smem(source(place), target, barrier)
                continue
            for mine in range(target.shape[0]):
                plgpu.copy_gmem_to_smem(source(place, mine), target.at[mine], barrier)

    def _tile(self, name: str, slot):
        """What this warpgroup reads."""
        tile = self.buffers[name].at[slot]
        if name not in self.own:
            return tile
        return tile.at[this_warpgroup(tile.shape[0])]

    def _copy_over(self, step) -> None:
        """Starts the next copy into the slot of a step whose tiles are read."""
        later = step + self.slots
        pl.when(later < self.stop)(lambda: self._copy(later))

    def fill(self) -> None:
        """Starts the first copies."""
        stop = jnp.minimum(self.stop, self.first + self.slots)
        _for_each(self.first, stop, self._copy)

    def feed(self) -> None:
        """Starts all copies, for the warpgroups that read, and waits until they did."""
        self.fill()

        def over(step):
            plgpu.barrier_wait(self.used.at[self._slot(step)])
            self._copy_over(step)

        _for_each(self.first, self.stop, over)

    def visit(self, loop: Span, body: Callable, carry):
        """The last `carry = body(step, tiles by name, carry)` of some steps.

        Calls must visit all steps, in their order.
        """

        def one(step, carry):
            slot = self._slot(step)
            plgpu.barrier_wait(self.arrived.at[slot])
            tiles = {x: self._tile(x, slot) for x in self.buffers}
            carry = body(step, tiles, carry)
            plgpu.commit_smem()
            if self.used is not None:
                plgpu.barrier_arrive(self.used.at[slot])
            else:
                self._copy_over(step)
            return carry

        return lax.fori_loop(as_int32(loop.first), as_int32(loop.stop), one, carry)


def _for_each(first, stop, run: Callable) -> None:
    lax.fori_loop(first, stop, lambda step, _: run(step), None)


def with_ring(
    grid: Grid,
    stream: Callable[..., Stream],
    shapes: Named,
    warpgroups: int,
    own: tuple[str, ...] = (),
) -> None:
    """Reads the streams of this program's blocks, one after the other.

    Args:
      stream: function of a block's indices.
      shapes: of the tiles of a step, with their dtypes, by the names of its sources.
      warpgroups: that read; where there are two, a third one copies.
      own: the names of those of which each warpgroup has its own.
    """
    alone = warpgroups == 1
    of_each = {x: (warpgroups, *shapes[x].shape) for x in own if x in shapes}
    buffers = {
        x: jax.ShapeDtypeStruct(of_each.get(x, s.shape), s.dtype)
        for x, s in shapes.items()
    }
    copies = sum(warpgroups if x in of_each else 1 for x in shapes)
    slots = STAGES if alone else _stages(buffers)

    def scoped(*shared):
        def each(use: Callable[[Ring], None]):
            grid.visit(lambda *at: use(Ring(stream(*at), own, *shared)))

        def copying():
            plgpu.set_max_registers(COPIER_REGISTERS, action="decrease")
            each(Ring.feed)

        def reading():
            plgpu.set_max_registers(READER_REGISTERS, action="increase")
            each(lambda ring: ring.stream.read(ring))

        if alone:
            return each(_fill_and_read)
        copies = lax.axis_index("warpgroup") == warpgroups
        pl.when(copies)(copying)
        pl.when(jnp.logical_not(copies))(reading)

    memory = (
        {x: plgpu.SMEM((slots, *b.shape), b.dtype) for x, b in buffers.items()},
        plgpu.Barrier(num_arrivals=copies, num_barriers=slots),
    )
    if alone:
        pl.run_scoped(scoped, *memory)
    else:
        used = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=slots)
        pl.run_scoped(scoped, *memory, used, collective_axes=("warpgroup",))


def _fill_and_read(ring: Ring) -> None:
    ring.fill()
    ring.stream.read(ring)


def _stages(buffers: Named) -> int:
    step = sum(math.prod(x.shape) * x.dtype.itemsize for x in buffers.values())
    return max(STAGES, min(MOST_STAGES, ROOM // step))


def this_warpgroup(warpgroups: int) -> Any:
    """The number of this warpgroup among so many of a program."""
    return lax.axis_index("warpgroup") if warpgroups > 1 else 0


def as_int32(x):
    """A Python number as an int32, anything else as it is."""
    return np.int32(x) if isinstance(x, int) else x
