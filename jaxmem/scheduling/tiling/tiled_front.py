"""Candidates that run regions in tiles, in one front with those that only recompute.

What is kept and what runs at one time add up to a peak, and either can be made less:
by recomputation, or by tiles. So each rate of recomputation is combined with limits for
what runs at one time, each half of the one before, and each limit with heads over
tokens and with heads over the vocabulary. Two predictions for a limit, with most kept
and with least, say what its peak is between.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxmem.chips import get_target
from jaxmem.ir.propagation import shardings_in
from jaxmem.ir.scans import is_var
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._searched import (
    LEAST,
    Candidate,
    Front,
    SearchBound,
    SearchedStep,
    descending,
)
from jaxmem.scheduling.order.ordered import OperationOrder
from jaxmem.scheduling.plan.rows import TiledRegion
from jaxmem.scheduling.search.traced_step import OFF, TracedStep

_HALVINGS = 6  # of what runs at one time, to the least limit: each is a rewrite more
_CLEARLY = 0.1  # of a peak: what is worth a compile where nobody asked for fewer bytes
# Candidates that may take least once they are compiled: XLA may not take the smallest
# tiles as they are predicted.
UNCERTAIN = 3


# Configurations that take what runs at one time to a limit; the last of them does it.
Cuts = Callable[[int], tuple[Any, ...]]


@dataclass(frozen=True)
class Room:
    """Bytes of predicted peaks, by whether they will do.

    Attributes:
      enough: what surely fits: there are no smaller tiles than those that take as long
        as a candidate below it.
      most: above it nothing fits, and only what takes least of such tiles is told.
    """

    enough: float = -math.inf
    most: float = math.inf

    @classmethod
    def within(cls, step: SearchedStep, bound: SearchBound) -> "Room":
        """What predictions may be, for compiled peaks within a bound."""
        above = bound.above(step.front[0].choice, math.inf)
        if not math.isfinite(above + bound.limit):
            return cls()
        return cls(bound.limit / OFF - above, bound.limit * OFF - above)


ANY = Room()


def in_tiles(step: TracedStep, flat: Sequence[Candidate], *how: Any) -> list[Candidate]:
    """`with_tiles`, or `beside_sequences` where some have a sequence of their own."""
    return (beside_sequences if in_sequence(flat) else with_tiles)(step, flat, *how)


def in_sequence(flat: Sequence[Candidate]) -> bool:
    """Whether some have a sequence of their own: of operations, by their numbers."""
    return any(one.choice.get(OperationOrder).sequence for one in flat)


def candidates_in_tiles(
    step: SearchedStep, cuts_to: Cuts, bound: SearchBound, alone: bool
) -> Front:
    """What is within a bound and takes less time than it says.

    `alone`: as for `with_tiles`.
    """
    how = cuts_to, Room.within(step, bound), alone, bound.seconds
    found = in_tiles(step.traced, step.front, *how)
    return list(filter(bound.allows, found))


def clearly_smaller(step: SearchedStep, cuts_to: Cuts) -> Iterator[tuple[Any, ...]]:
    """Configurations that take the first of a front down, each by a good part."""
    free = step.front[0].choice
    if in_sequence(step.front):
        return  # its numbers are those of a step without tiles
    last = step.traced.predicted(free)
    for cuts in _cuts(step.traced, free, 0, cuts_to, ANY):
        peak = step.traced.predicted(free.having(*cuts))
        if peak < (1 - _CLEARLY) * last:
            last = peak
            yield cuts


def beside_sequences(
    step: TracedStep,
    flat: Sequence[Candidate],
    cuts_to: Cuts,
    room: Room = ANY,
    alone: bool = False,
    within: float = math.inf,
) -> list[Candidate]:
    """The front of sequences, and of tiles in the first of them, without a sequence.

    The other arguments are as for `with_tiles`.
    """
    # The positions of a sequence are those of a step without tiles.
    free, plain = flat[0], flat[0].choice
    order = plain.get(OperationOrder)
    if order.sequence:
        plain = plain.having(replace(order, sequence=()))
    found = [] if alone else list(flat)
    for cuts in _cuts(step, plain, 0, cuts_to, room):
        choice = plain.having(*cuts)
        seconds = _tile_seconds(step, choice)
        if seconds >= _least_seconds(found, room.enough, within):
            break
        peak = step.predicted(choice)
        found.append(replace(free, choice=choice, seconds=seconds, bytes=peak))
    return _by_seconds(found)


def _least_seconds(found: Sequence[Candidate], enough: float, within: float) -> float:
    """Those of the candidates that will do; smaller tiles take no less than larger."""
    return min([within, *(one.seconds for one in found if one.bytes <= enough)])


def with_tiles(
    step: TracedStep,
    flat: Sequence[Candidate],
    cuts_to: Cuts,
    room: Room = ANY,
    alone: bool = False,
    within: float = math.inf,
) -> list[Candidate]:
    """The front of these candidates, as they are and in tiles; `bytes` are of peaks.

    Of those that take equally long, the ones of fewer tiles come first.

    Args:
      step: the step.
      flat: candidates in no tiles, from those that keep most on.
      cuts_to: configurations for a limit.
      room: bytes of predictions that will do.
      alone: whether it is the front of those in tiles alone.
      within: seconds that a candidate takes less than.
    """
    within -= min(one.seconds for one in flat)
    lines = [] if alone else [_line(step, flat, ())]
    found = [line.candidate(one) for line in lines for one in flat]
    least = flat[-1]
    for cuts in _cuts(step, least.choice, least.bytes, cuts_to, room):
        choice = least.choice.having(*cuts)
        seconds, peak = _tile_seconds(step, choice), step.predicted(choice)
        if seconds >= _least_seconds(found, room.enough, within):
            break
        some = flat if peak <= room.most else [least]
        found += map(_line(step, some, cuts).candidate, some)
    return _by_seconds(found)


def _by_seconds(candidates: Sequence[Candidate]) -> list[Candidate]:
    found = sorted(candidates, key=lambda one: (one.seconds, -one.bytes))
    return descending(found, LEAST * found[0].bytes) if found else []


@dataclass(frozen=True)
class _Line:
    """Peaks and seconds with the same cuts, linear in what is kept."""

    cuts: tuple[Any, ...]  # configurations
    kept: tuple[int, int]  # most, least
    peaks: tuple[int, int]
    seconds: tuple[float, float]  # of tiles

    def candidate(self, flat: Candidate) -> Candidate:
        most, least = self.kept
        share = (flat.bytes - least) / (most - least) if most > least else 0.0
        between = lambda ends: ends[1] + share * (ends[0] - ends[1])
        return replace(
            flat,
            choice=flat.choice.having(*self.cuts),
            bytes=round(between(self.peaks)),
            seconds=flat.seconds + max(0.0, between(self.seconds)),
        )


def _cuts(
    step: TracedStep, choice: Choice, kept: int, cuts_to: Cuts, room: Room
) -> Iterator[tuple[Any, ...]]:
    """Configurations that make other numbers of tiles, from the largest limit on."""
    seen: set[tuple[TiledRegion, ...]] = {()}
    limit = _at_one_time(step, choice, kept)
    memory = get_target(step.target).memory_bytes
    if memory is not None:  # what runs at one time in more than that cannot fit
        limit = min(limit, 2 * memory)
    for _ in range(_HALVINGS):
        limit //= 2
        if limit > 2 * max(room.most, 1):  # parts hold more than half of it
            continue
        cuts = cuts_to(limit)
        rows = _rows(step, choice.having(*cuts))
        made = step.rewritten(choice.having(*cuts), ordered=False)
        if rows not in seen and made.did(type(cuts[-1])):
            seen.add(rows)
            yield cuts


def _at_one_time(step: TracedStep, choice: Choice, kept: int) -> int:
    """Bytes beside what is kept, and beside what the step gives back."""
    jaxpr = step.rewritten(choice, ordered=False).jaxpr
    in_place = step.aliases(jaxpr)
    outs = (v for i, v in enumerate(jaxpr.jaxpr.outvars) if i not in in_place)
    shardings = shardings_in(jaxpr, step.shardings)
    made = sum(shardings.bytes_of(v) for v in outs if is_var(v))
    return max(0, step.predicted(choice) - kept - made)


def _rows(step: TracedStep, choice: Choice) -> tuple[TiledRegion, ...]:
    return step.rewritten(choice, ordered=False).tiles


def _tile_seconds(step: TracedStep, choice: Choice) -> float:
    return sum(row.seconds for row in _rows(step, choice))


def _line(step: TracedStep, flat: Sequence[Candidate], cuts: tuple[Any, ...]) -> _Line:
    ends = flat[0], flat[-1]
    choices = [one.choice.having(*cuts) for one in ends]
    seconds = [_tile_seconds(step, choice) for choice in choices]
    peaks = [step.predicted(c) for c in choices]
    kept = ends[0].bytes, ends[1].bytes
    return _Line(cuts, kept, (peaks[0], peaks[1]), (seconds[0], seconds[1]))
