"""What it costs to run a step in micro-batches: seconds beyond those of the step.

The roofline is that of tiles (`price`), over the equations of the step and of the loops
in it: weights are read by every part, the float32 sums of gradients are read and
written by each, and every kernel is started `n` times.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxmem.ir.axis_labels import CutAxes
from jaxmem.ir.costs import MACHINES, Machine
from jaxmem.ir.costs import seconds as seconds_of
from jaxmem.scheduling.tiling.batch import Batch
from jaxmem.scheduling.tiling.partial_sums import PartTreatment, State
from jaxmem.scheduling.tiling.price import is_fused, kernel, longer


class _Work(NamedTuple):
    """Seconds of kernels: of the whole batch, and of one part; how many they are."""

    whole: float = 0.0
    part: float = 0.0
    kernels: int = 0

    def times(self, count: int) -> "_Work":
        return _Work(count * self.whole, count * self.part, count * self.kernels)


def seconds(batch: Batch, target: str) -> float:
    """What a step takes longer in the parts of its batch, on a chip.

    Args:
      batch: what of the step runs in parts.
      target: the chip's name, one of `jaxmem.targets()`.

    Returns:
      Seconds, 0.0 where the parts cost nothing by the roofline.
    """
    at = sorted(batch.treated.keys() | batch.in_part())
    eqns = [batch.graph.eqns[i] for i in at]
    treated = {k: batch.treated[i] for k, i in enumerate(at) if i in batch.treated}
    work = _of_list(eqns, treated, batch.n, MACHINES[target])
    return longer(*work, batch.n)


def _of_list(
    eqns: Iterable[Any], treated: Mapping[int, PartTreatment], n: int, machine: Machine
) -> _Work:
    return _total(_of(eqn, treated.get(i), n, machine) for i, eqn in enumerate(eqns))


def _total(works: Iterator[_Work]) -> _Work:
    found = list(works)
    return _Work(*map(sum, zip(*found, strict=True))) if found else _Work()


def _of(eqn, found: PartTreatment | None, n: int, machine: Machine) -> _Work:
    if is_fused(eqn):
        return _Work()
    if found is None:  # each part does it as the step does
        same = seconds_of(eqn, machine) or 0.0
        return _Work(same, same, 1)
    if found.inner:
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        bodies = (
            _of_list(body.jaxpr.eqns, body.treated, n, machine) for body in found.inner
        )
        # one branch of a `cond` is taken, and nobody knows which
        return max(bodies).times(times)
    cut = CutAxes(_axes(found.ins), _axes(found.outs))
    if all(axis is None for axis in (*cut.ins, *cut.outs)):
        n = 1  # on terms of sums: each part does it with whole arrays
    nowhere = CutAxes((None,) * len(cut.ins), (0,) * len(cut.outs))
    whole = kernel(eqn, nowhere, 1, machine)
    return _Work(whole, kernel(eqn, cut, n, machine), 1)


def _axes(states: Iterable[State]) -> tuple[int | None, ...]:
    """Along which axes arrays are cut; terms of a sum are whole arrays."""
    return tuple(s if isinstance(s, int) else None for s in states)
