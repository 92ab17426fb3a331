"""The choices in segments of layers that are worth trying: few seconds, or few bytes.

Each rung of the ladder can go in segments of any size, with segments inside of them or
without. What is drawn of them is the same curve: bytes over seconds.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxmem.ir.costs import MACHINES, Machine, flops, seconds
from jaxmem.scheduling._choice import price_at
from jaxmem.scheduling.recompute.pairs import Cut, Pair, cut
from jaxmem.scheduling.recompute.segments import of_every_size
from jaxmem.scheduling.search.front import LEAST, Rung, Step, descending


def in_segments(step: Step, flat: Sequence[Rung]) -> list[Rung]:
    """Rungs that run a segment of layers at a time again, where that is worth it.

    `flat`: the rungs of `ladder`; where their bytes are reached, it has fewer seconds.
    Nothing waits in the host's memory.
    """
    if step.named or step.is_list:
        return []
    flat = [rung for rung in flat if rung.choice.offload is None]
    found = [r for r in _of_any_size(step, flat) if _is_below(r, flat)]
    found.sort(key=lambda rung: rung.seconds)
    return descending(found, LEAST * flat[0].bytes)


def _of_any_size(step: Step, rungs: Sequence[Rung]) -> Iterator[Rung]:
    """What each rung is in segments, of all sizes at which something is saved."""
    machine = MACHINES[step.machine]
    for rung in rungs:
        price = price_at(rung.choice.rate, step.machine)
        cuts = [(pair, cut(pair, price, late=False)) for pair in step.scans]
        flat = [_in_no_segments(*found, machine) for found in cuts]
        ways = [dict(_by_size(*found, machine)) for found in cuts]
        for sizes in sorted({sizes for of_pair in ways for sizes in of_pair}):
            taken = [a.get(sizes, b) for a, b in zip(ways, flat, strict=True)]
            kept = sum(figures.bytes for figures in taken)
            time, work = np.sum([figures.work for figures in taken], 0)
            yield Rung(replace(rung.choice, segments=sizes), kept, time, work)


@dataclass(frozen=True)
class _Figures:
    """Of a pair of scans: bytes kept, and [seconds, flops of matmuls] done again."""

    bytes: int
    work: np.ndarray


def _in_no_segments(pair: Pair, found: Cut, machine: Machine) -> _Figures:
    again = ((pair.body.eqns[i], pair.length) for i in found.again)
    return _Figures(pair.length * found.bytes, _work(again, machine))


def _by_size(pair: Pair, found: Cut, machine: Machine) -> Iterator[tuple]:
    """(sizes, figures) of a pair's segments, which differ in how often layers run."""
    plans = list(of_every_size(pair, found))
    if not plans:
        return
    within = _work(plans[0].remake.repeated, machine)
    layer = _work(((eqn, 1) for eqn in plans[0].paid), machine)
    for plan in plans:
        yield plan.sizes, _Figures(plan.bytes, within + plan.turns * layer)


def _work(again: Iterable[tuple[Any, int]], machine: Machine) -> np.ndarray:
    costs = [(n * (seconds(e, machine) or 0.0), n * flops(e)) for e, n in again]
    return np.array([(0.0, 0.0), *costs]).sum(0)


def _is_below(rung: Rung, flat: Sequence[Rung]) -> bool:
    """Whether two flat rungs, each for some of the layers, would take more seconds."""
    if rung.bytes < flat[-1].bytes:
        return True
    kept = [r.bytes for r in reversed(flat)]
    return rung.seconds < np.interp(rung.bytes, kept, [r.seconds for r in flat[::-1]])
