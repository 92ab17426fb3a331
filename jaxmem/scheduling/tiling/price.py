"""What it costs to run a region in tiles: seconds beyond those of the region as it is.

By a roofline: a kernel takes its arithmetic or its bytes, whichever is longer. Of the
bytes, what the tiles share is read by each of them (weights), and a running sum is read
and written by each, in float32: a product of few rows takes as long as its weights or
its sum. Kernels are queued while others run, so their starts count where they take
longer than what they start. What is fused into its reader moves through the chip once,
whether in tiles or not. Random bits that others need too are drawn once more.
"""

from collections.abc import Sequence
from typing import Any

from jaxmem.ir.axis_labels import CutAxes
from jaxmem.ir.costs import FUSED, MACHINES, Machine, flops
from jaxmem.ir.costs import seconds as seconds_of
from jaxmem.ir.jaxprs import bodies
from jaxmem.ir.scans import is_var
from jaxmem.ir.shards import WHOLE, Spreads
from jaxmem.scheduling.tiling.regions import Region

_START = 3e-6  # seconds until the next kernel can be queued
_SUM = 4  # bytes of an element of a running sum, at the least


def seconds(
    eqns: Sequence[Any], region: Region, target: str, spreads: Spreads = WHOLE
) -> float:
    """What a region takes longer in its tiles than as it is, on a chip.

    Args:
      eqns: the list of equations that the region's positions are in.
      region: what is cut, and along which axes.
      target: the chip's name, one of `jaxmem.targets()`.
      spreads: how the arrays are spread over devices; the seconds are those of one.

    Returns:
      Seconds, 0.0 where the tiles cost nothing by the roofline.
    """
    machine = MACHINES[target]
    whole, tile = [], []
    for i in region.eqns:
        if is_fused(eqns[i]):
            continue
        cut = region.cut[i]
        nowhere = CutAxes((None,) * len(cut.ins), (0,) * len(cut.outs))
        whole.append(kernel(eqns[i], nowhere, 1, machine, spreads))
        tile.append(kernel(eqns[i], cut, region.n, machine, spreads))
    drawn = _drawn_twice(eqns, region)
    bits = ((seconds_of(e, machine) or 0.0) / spreads.workers(e) for e in drawn)
    return longer(sum(whole), sum(tile), len(tile), region.n) + sum(bits)


def _drawn_twice(eqns: Sequence[Any], region: Region) -> list[Any]:
    """What draws random bits in a region that others outside of it draw too."""
    draws = {i for i, e in enumerate(eqns) if e.primitive.name == "random_bits"}
    of = lambda i: (eqns[i].invars[0], str(eqns[i].params))
    outside = set(map(of, draws - region.eqns))
    return [eqns[i] for i in draws & region.eqns if of(i) in outside]


def longer(whole: float, tile: float, kernels: int, n: int) -> float:
    """What `n` tiles take longer than the whole, from seconds of the kernels alone."""
    starts = _START * (1 + kernels)  # one for the loop's own counter and condition
    return max(0.0, n * max(tile, starts) - max(whole, starts - _START))


def is_fused(eqn) -> bool:
    """Whether an equation is done inside of what reads its result."""
    return eqn.primitive.name in FUSED or eqn.primitive.name == "optimization_barrier"


def kernel(
    eqn, cut: CutAxes, n: int, machine: Machine, spreads: Spreads = WHOLE
) -> float:
    """Seconds of one tile of an equation; an output that is cut nowhere is a sum."""
    moved = sum(
        spreads.bytes_of(v) / (1 if place is None else n)
        for v, place in zip(eqn.invars, cut.ins, strict=True)
        if is_var(v)
    )
    for v, place in zip(eqn.outvars, cut.outs, strict=True):
        whole = place is None
        own = _summed(v) / spreads.shards(v) if whole else spreads.bytes_of(v) / n
        moved += own
    arithmetic = _arithmetic(eqn, n, machine) / spreads.workers(eqn)
    return max(arithmetic, moved / machine.bandwidth)


def _summed(v) -> int:
    """Bytes of a running sum, read and written."""
    return 2 * v.aval.size * max(_SUM, v.aval.dtype.itemsize)


def _arithmetic(eqn, n: int, machine: Machine) -> float:
    if bodies(eqn):  # a loop: its own operations, each on a tile
        return (seconds_of(eqn, machine) or 0.0) / n
    narrow = all(v.aval.dtype.itemsize <= 2 for v in eqn.invars)
    return flops(eqn) / n / (machine.narrow if narrow else machine.wide)
