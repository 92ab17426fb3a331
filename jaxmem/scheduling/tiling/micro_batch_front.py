"""Candidates that run the whole step in micro-batches.

Where nothing else fits, their number is the least that is predicted to fit with nothing
recomputed, else the one that is predicted to take least bytes; where something does,
the one that takes least seconds with what its parts have to recompute. What a part
recomputes, or does in tiles, is looked for as for a step, and is paid for in each.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._rewritten import Rewritten
from jaxmem.scheduling._searched import Candidate
from jaxmem.scheduling.recompute.front import pareto_front
from jaxmem.scheduling.recompute.space import space_at_sight
from jaxmem.scheduling.search.traced_step import TracedStep
from jaxmem.scheduling.tiling.batch import Batch
from jaxmem.scheduling.tiling.batch_row import row_of
from jaxmem.scheduling.tiling.micro_batches import MicroBatches, left_whole, lengths
from jaxmem.scheduling.tiling.tiled_front import Room, with_tiles
from jaxmem.scheduling.tiling.tiles import tiles_to

_MOST = 1024  # micro-batches
# Hopeless numbers are not looked at, since each is a rewrite of the whole step. Neither
# ratio is measured: where they are too small they cost predictions.
_MORE = 1.5  # times as many, at the least, are looked at next
_HARDLY = 1.2  # times less than a prediction: what one for a part may be


@dataclass(frozen=True)
class _InParts:
    """A step in micro-batches.

    Attributes:
      n: how many they are.
      batch: what runs in them.
      part: the step as the search sees what else is done within a part.
      seconds: that the step takes longer.
    """

    n: int
    batch: Batch
    part: TracedStep
    seconds: float

    @functools.cached_property
    def bytes(self) -> int:
        """Of the peak that is predicted where nothing else is done that costs."""
        return self.part.predicted(Choice(self.part.target))

    def candidate(self, of_part: Candidate) -> Candidate:
        """What is a candidate within a part, of the step."""
        return replace(
            of_part,
            choice=of_part.choice.having(MicroBatches(self.n)),
            seconds=self.seconds + self.n * of_part.seconds,
        )


def in_micro_batches(
    step: TracedStep, room: float, below: float = math.inf
) -> list[Candidate]:
    """The front of the step in one number of micro-batches; `bytes` are of peaks.

    Args:
      step: the step.
      room: bytes of a prediction that will do.
      below: bytes that some candidate has to be predicted below, or there are none.
    """
    chosen = _chosen(step, room)
    if chosen is None:
        return []
    flat = _flat(chosen)
    found = _by_peaks(chosen, flat)
    if found[-1].bytes > room:
        found = with_tiles(chosen.part, flat, tiles_to, Room(room))
    found = list(map(chosen.candidate, found))
    return found if any(one.bytes < below for one in found) else []


def in_least_seconds(
    step: TracedStep, room: float, most: float, fastest: float
) -> list[Candidate]:
    """The front in that number of micro-batches that is predicted to fit soonest.

    In a few of them much is recomputed, in many nothing: both are seconds. No part is
    in tiles.

    Args:
      step: the step.
      room: bytes of a prediction that will do.
      most: seconds that what fits has to take less than, or there are none.
      fastest: seconds of what the whole step may recompute, at the least: what parts
        recompute saves no more.
    """
    least, best = most, []
    for one in _numbers(step):
        if one.seconds + fastest >= least:
            break
        found = list(map(one.candidate, _by_peaks(one, _flat(one))))
        time = _seconds_within(found, room)
        if time < least:
            least, best = time, found
    return best


def in_fewest(step: TracedStep, room: float, most: float) -> list[Candidate]:
    """The step in the fewest micro-batches that are predicted to fit, if any.

    Nothing else is done within them. The arguments are as for `in_least_seconds`.
    """
    for one in _numbers(step):
        if one.seconds >= most:
            break
        if one.bytes <= room:
            plain = Candidate(Choice(step.target), one.bytes, 0.0)
            return [one.candidate(plain)]
    return []


def _flat(one: _InParts) -> list[Candidate]:
    """What a part may recompute."""
    return pareto_front(space_at_sight(one.part))


def _seconds_within(front: Sequence[Candidate], room: float) -> float:
    """Of what lies on a front, some layers like one candidate, some like the next."""
    if front[-1].bytes > room:
        return math.inf
    kept, seconds = [c.bytes for c in front], [c.seconds for c in front]
    return float(np.interp(room, kept[::-1], seconds[::-1]))


def why_not(step: TracedStep) -> list[str]:
    """A sentence on what keeps a step from running in micro-batches, if anything."""
    whys: list[str] = []
    for n in first_counts(step):
        made = _rewritten(step, n)
        if made.did(MicroBatches):
            return []
        level = made.records[0].entered[MicroBatches]
        config = MicroBatches(n)
        whys += level.looked_at(
            lambda level, config=config: list(left_whole(level, config))
        )
    return whys[:1]


def _chosen(step: TracedStep, room: float) -> _InParts | None:
    """The least number that is predicted to fit, else the one that takes least."""
    # bytes are hardly less than divided by the number
    times = lambda size: size / room / _HARDLY if room > 0 else 1
    more = lambda one: one.n * max(_MORE, times(one.bytes))
    best = None
    for one in _numbers(step, times(step.predicted(Choice(step.target))), more):
        if best is not None and one.bytes >= best.bytes:
            break
        best = one
        if one.bytes <= room:
            break
    return best


def _numbers(
    step: TracedStep,
    least: float = 2,
    more: Callable[[_InParts], float] = lambda one: one.n + 1,
) -> Iterator[_InParts]:
    """The step in more and more micro-batches; `more`: at the least, after each."""
    found = (_in_parts(step, n) for n in first_counts(step, least))
    one = next(filter(None, found), None)
    while one is not None:
        yield one
        n = _divisor(one.batch.length, more(one))
        one = _in_parts(step, n) if n > one.n else None


def first_counts(step: TracedStep, least: float = 2) -> list[int]:
    """The least numbers that divide what may be the number of examples."""
    level = step.rewritten(Choice(step.target), ordered=False).records[0]
    of = lengths(level.entered[MicroBatches])
    return sorted({_divisor(size, least) for size in of})


def _divisor(size: int, least: float) -> int:
    """The first from `least` on; the greatest there may be where there is none."""
    divisors = [n for n in range(2, min(size, _MOST) + 1) if size % n == 0] or [1]
    return next((n for n in divisors if n >= least), divisors[-1])


def _in_parts(step: TracedStep, n: int) -> _InParts | None:
    made = _rewritten(step, n)
    if not made.did(MicroBatches):
        return None
    batch = next(r for one, r in made.records[0].rewrites if one.config is MicroBatches)
    within = functools.cache(functools.partial(_within, step, n))
    part = replace(step, rewritten=within)
    return _InParts(n, batch, part, row_of(batch, step.target).seconds)


def _rewritten(step: TracedStep, n: int) -> Rewritten:
    return step.rewritten(Choice(step.target, (MicroBatches(n),)), ordered=False)


def _within(step: TracedStep, n: int, choice: Choice, **how: Any) -> Rewritten:
    """The step in micro-batches, with records of what is done to one of them."""
    made = step.rewritten(choice.having(MicroBatches(n)), **how)
    first, *others = made.records
    rewrites = tuple(p for p in first.rewrites if p[0].config is not MicroBatches)
    once = (replace(record, times=1) for record in others)
    return replace(made, records=(replace(first, rewrites=rewrites), *once))


def _by_peaks(one: _InParts, flat: Sequence[Candidate]) -> list[Candidate]:
    """Candidates by the peaks predicted for the first and the last of them.

    First the one that recomputes nothing: what costs nothing by its price may still be
    slower where nothing is in a scan, since the compiler fuses it otherwise.
    """
    ends, predicted = (flat[-1], flat[0]), one.part.predicted
    kept, peaks = [c.bytes for c in ends], [predicted(c.choice) for c in ends]
    between = lambda c: round(float(np.interp(c.bytes, kept, peaks)))
    found = [replace(c, bytes=between(c)) for c in flat]
    if found[0].seconds < 0 or found[0].bytes >= one.bytes:
        return found
    return [Candidate(Choice(one.part.target), one.bytes, 0.0), *found]
