"""The choices worth trying: from keeping most to computing most.

The bytes kept, drawn over the seconds of computing again, are a convex curve whose
corners are cuts, each the best for some rate of bytes a second. Two corners give the
rate at which they are worth the same; the cut at that rate is another corner between
them, or there is none. Below them come those that have what they keep wait in the
host's memory. Running segments of layers again (`front_segments.py`) is a ladder of
its own: what a layer needs while it runs is another figure there.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxmem.ir.costs import MACHINES, seconds
from jaxmem.ir.scans import kept_size
from jaxmem.scheduling._choice import Choice, price_at
from jaxmem.scheduling.recompute.minimum_cut import price_of
from jaxmem.scheduling.recompute.pairs import Cut, Pair, cut, cut_by_names
from jaxmem.scheduling.recompute.unrolled import unrolled, without_loops

_LOWEST = 1e-3  # bytes a second: everything that can be is computed again
_STEP = 8.0  # from one rate to the next that is looked at
LEAST = 2e-3  # of what is kept at first: what two rungs differ by, or they are one


@dataclass(frozen=True)
class Rung:
    """A choice, and what it means.

    Attributes:
      choice: what is computed again.
      bytes: what is kept from the forward to the backward pass, or another figure that
        differs from the peak by about as much on every rung.
      seconds: of computing again.
      flops: of matmuls that are computed again; only segments have them.
    """

    choice: Choice
    bytes: int
    seconds: float
    flops: float = 0.0


@dataclass(frozen=True)
class Step:
    """What can be varied in a step.

    Attributes:
      scans: its pairs of forward and backward scans.
      lists: lists of equations with a forward and a backward pass; none where most of
        what is kept is kept by scans.
      machine: the target whose rates count.
      named: whether only what has a `checkpoint_name` can be kept.
      offload: whether what scans keep may wait in the host's memory.
    """

    scans: Sequence[Pair]
    lists: Sequence[Pair]
    machine: str
    named: bool = False
    offload: bool = False

    @property
    def is_list(self) -> bool:
        """Whether equations outside of loops are computed again."""
        return bool(self.lists)

    @property
    def layers(self) -> int:
        """Of the longest scans; 1 where there are none, or all must do the same."""
        if self.named:
            return 1
        return max((pair.length for pair in self.scans), default=1)


def step_of(
    scans: Sequence[Pair],
    lists: Sequence[Any],
    machine: str,
    named: bool = False,
    offload: bool = False,
) -> Step:
    """What can be varied: loops, or else what is outside of them.

    `lists`: closed jaxprs whose equations, outside of loops, may hold both passes.
    """
    written_out = [pair for pair in map(unrolled, lists) if pair is not None]
    stacked = sum(pair.length * pair.bytes for pair in scans)
    few = sum(pair.bytes for pair in written_out) <= stacked
    return Step(scans, () if few else written_out, machine, named, offload)


def ladder(step: Step) -> list[Rung]:
    """The corners, the fewest seconds first."""
    first, free = _rung(step, None), _rung(step, math.inf)
    least = LEAST * first.bytes
    lowest = MACHINES[step.machine].host / 2 if step.offload else _LOWEST
    last = _cheapest(step, _rung(step, lowest), least)
    found = [first, free, *_between(step, free, last, least), last]
    if step.offload:
        found += _away(step, last)
    return descending(found, least)


def _cheapest(step: Step, rung: Rung, least: float) -> Rung:
    """The rung of the highest rate that keeps next to nothing more than this one.

    A softmax's maxima and sums are such: few bytes, and dear, since all logits must be
    there to make them again.
    """
    best = rung
    while best.seconds > 0:
        rate = _STEP * (best.choice.rate or 0.0)
        following = _rung(step, rate)
        if following.bytes - rung.bytes > least:
            break
        best = following
    return best


def descending(rungs: Sequence[Rung], least: float) -> list[Rung]:
    """Those that keep less than the one before, by more than `least` bytes."""
    kept = list(rungs[:1])
    for rung in rungs[1:]:
        if kept[-1].bytes - rung.bytes > least:
            kept.append(rung)
    return kept


def _between(step: Step, rich: Rung, poor: Rung, least: float) -> Iterator[Rung]:
    if rich.bytes - poor.bytes <= least or poor.seconds <= rich.seconds:
        return
    rate = (rich.bytes - poor.bytes) / (poor.seconds - rich.seconds)
    rung = _rung(step, rate)
    if min(rich.bytes - rung.bytes, rung.bytes - poor.bytes) > least:
        yield from _between(step, rich, rung, least)
        yield rung
        yield from _between(step, rung, poor, least)


def _away(step: Step, rung: Rung) -> Iterator[Rung]:
    """More and more of what a rung keeps in the host's memory, the largest first.

    A byte there and back takes the same time whatever it belongs to. So one rate parts
    what is worth computing again from what is worth sending away: that of this rung.
    """
    kept = [
        (kept_size(v), pair.length)
        for pair, found in _cuts(step, rung.choice.rate)
        for v in found.kept
    ]
    host = MACHINES[step.machine].host
    for size in sorted({size for size, _ in kept}, reverse=True):
        gone = sum(s * length for s, length in kept if s >= size)
        choice = replace(rung.choice, offload=size)
        yield Rung(choice, rung.bytes - gone, rung.seconds + 2 * gone / host)


def _cuts(step: Step, rate: float | None) -> list[tuple[Pair, Cut]]:
    """What each pair of scans keeps."""
    price = price_at(rate, step.machine)
    cut_of = cut_by_names if step.named else cut
    return [(pair, cut_of(pair, price)) for pair in step.scans]


def _rung(step: Step, rate: float | None) -> Rung:
    price = price_at(rate, step.machine)
    cuts = _cuts(step, rate)
    if rate is not None:
        cuts += [(pair, cut(pair, without_loops(price))) for pair in step.lists]
    kept = sum(pair.length * found.bytes for pair, found in cuts)
    kept += sum(pair.bytes for pair in step.lists) if rate is None else 0
    cost = partial(seconds, machine=MACHINES[step.machine])
    again = (
        pair.length * (price_of(pair.body, i, cost) or 0.0)
        for pair, found in cuts
        for i in found.again
    )
    choice = Choice(step.machine, rate, lists=step.is_list, named=step.named)
    return Rung(choice, kept, sum(again))
