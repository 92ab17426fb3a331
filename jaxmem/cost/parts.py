"""What parts cost: seconds on one device beyond those of the equations as they are.

Tiles, heads over the vocabulary and micro-batches compete in one search, by this one
roofline: a kernel takes its arithmetic or its bytes, whichever is longer, of what one
device has. Of the bytes, what the parts share is read by each of them (weights), and a
running sum is read and written by each, in float32: a product of few rows takes as long
as its weights or its sum, and its tiles may leave processors without work. Each part
starts its kernels. What is fused into its reader moves through the chip once, whether
in parts or not.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import jax.numpy as jnp

from jaxmem.chips import Rates, rates_of
from jaxmem.cost.equations import arithmetic, seconds, started
from jaxmem.ir.fused import is_fused
from jaxmem.ir.jaxprs import bodies, elements
from jaxmem.ir.placements import REPLICATE, Placements, Shard
from jaxmem.ir.scans import is_var
from jaxmem.ir.shards import Shardings


def wide(dtype):
    """The type in which parts of a sum are added."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.dtype("float32") if narrow else dtype


def summed_size(v) -> int:
    """Bytes of a variable while parts are added to it, on all devices together."""
    return elements(v.aval.shape) * wide(v.aval.dtype).itemsize


def sum_bytes(eqn, v, shardings: Shardings) -> float:
    """Bytes on one device of what the parts of an equation are added to."""
    # a product's sum is whole until it is scattered over the devices it is summed over
    partial = shardings.partial_bytes(eqn) / max(1, shardings.bytes_of(v))
    return summed_size(v) / shardings.shards(v) * max(1, partial)


@dataclass(frozen=True)
class Price:
    """What equations and their parts take.

    Attributes:
      target: the chip's name, one of `jaxmem.targets()`.
      shardings: how the equations' arrays are sharded over devices.
    """

    target: str
    shardings: Shardings = field(default_factory=Shardings)

    @property
    def rates(self) -> Rates:
        return rates_of(self.target)

    def whole(self, eqn) -> float:
        """An equation as it is."""
        outs = (Shard(0),) * len(eqn.outvars)
        return self.part(eqn, Placements((REPLICATE,) * len(eqn.invars), outs), 1)

    def part(self, eqn, placed: Placements, n: int) -> float:
        """One of `n` parts of it; an output that is cut nowhere is a running sum."""
        if is_fused(eqn):
            return 0.0
        moved = sum(
            self.shardings.bytes_of(v) / (1 if axis is None else n)
            for v, axis in placed.operands(eqn)
            if is_var(v)
        )
        for v, axis in zip(eqn.outvars, placed.out_axes, strict=True):
            if axis is None:  # read and written
                moved += 2 * sum_bytes(eqn, v, self.shardings)
            else:
                moved += self.shardings.bytes_of(v) / n
        work = max(self._work(eqn, placed, n), moved / self.rates.bandwidth)
        return work + started(eqn, self.rates)

    def seconds(self, eqn) -> float:
        """Of an equation and the loops in it, on one device."""
        return seconds(eqn, self.rates, self.shardings) or 0.0

    def longer(self, whole: float, loops: Iterable[float], n: int) -> float:
        """What `n` iterations of these loops take longer than the whole."""
        # a launch for each loop's own counter and condition
        return max(0.0, n * sum(one + self.rates.launch for one in loops) - whole)

    def _work(self, eqn, placed: Placements, n: int) -> float:
        """Of a part's arithmetic; of a loop that of its own operations."""
        if bodies(eqn):
            idle = replace(self.rates, launch=0.0, fill=0.0)
            work = seconds(eqn, idle, self.shardings) or 0.0
            # each part starts all kernels of the loop
            return work / n + self.seconds(eqn) - work
        return arithmetic(eqn, self.rates, self.shardings, placed.in_axes, n)
