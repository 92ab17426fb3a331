"""The passes' candidates, one pass after the other, until something fits.

The pass of which the fastest is expected to fit comes first; recomputation, where it
may do, only behind what changes the whole step. What fits first is taken; then each
pass is asked for candidates that are expected to fit in less time.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._searched import (
    Between,
    Candidate,
    Front,
    Searched,
    SearchedStep,
)
from jaxmem.scheduling.search.asks import Search
from jaxmem.scheduling.search.budget import BudgetSearch
from jaxmem.scheduling.search.peaks import Peaks, known_peaks
from jaxmem.scheduling.search.result import BudgetError, ReportedTrial, least_off
from jaxmem.scheduling.search.traced_step import ENOUGH, OFF
from jaxmem.scheduling.search.trials import TrialBound, Trials

# Compiles for one budget, once something fits: what users wait for, and no measurement.
_MOST = 8
_MORE = 4  # where one may be much faster
_KEPT = 2  # are kept for passes that change the whole step, and for each pass at least


@dataclass
class Fronts:
    """The candidates for one limit.

    Attributes:
      step: with its front of recomputation.
      passes: those that are asked, in this order.
      trials: what was compiled.
      free, undone: configurations, as for `BudgetSearch`.
      quick: whether the first that fits will do, and is guessed by its prediction.
      notes: why there were no candidates.
    """

    step: SearchedStep
    passes: Sequence[Searched]
    trials: Trials
    free: Sequence[Any] = ()
    undone: Sequence[Any] = ()
    quick: bool = False
    notes: tuple[str, ...] = ()
    _refining: list[Searched] = field(default_factory=list)
    _last: Front = ()  # the candidates of the last search
    _found_by: Searched | None = None  # whose candidates were the first that fit

    def search(self) -> Search[ReportedTrial]:
        """What fits first, or what takes less time than that."""
        if self._in_parts and (self.quick or self._may_fit()):
            yield from self._by_recomputation()
        best = self.trials.best or (yield from self._first())
        if self.quick or self.is_fast(best):
            return best
        # what must save more comes last: the others lower what it has to be below
        for one in sorted(reversed(self.passes), key=lambda one: one.margin):
            if not one.whole_step and one is not self._found_by:
                best = yield from self._faster(one, best, _MOST - _KEPT)
        for one in self.passes:
            if one.whole_step:
                best = yield from self._faster(one, best, _MOST)
        return best

    @property
    def _in_parts(self) -> bool:
        """Whether a pass runs operations in parts."""
        return any(one.in_parts for one in self.passes)

    def _may_fit(self) -> bool:
        """Whether recomputation may do, without what runs in parts."""
        first, last = self.step.front[0], self.step.front[-1]
        rest = self.trials[first.choice].peak - first.bytes
        return last.bytes + rest <= OFF * self.step.limit

    def _by_recomputation(self) -> Search[None]:
        """What recomputes; first what is faster than that by prediction."""
        front = self.step.front
        if not self.quick:
            yield from self._sooner()
        if (best := self.trials.best) is not None:
            most = self._at_most(best) - self._gain(best)
            front = [one for one in front if one.seconds < most]
            if math.isinf(self._seconds(front)):
                return
        with suppress(BudgetError):
            yield from self.among(front)

    def _sooner(self) -> Search[None]:
        """What changes the whole step and does nothing else, where that is faster.

        By prediction, than the first candidate of recomputation that is to fit.
        """
        most = self._seconds(self.step.front) - self.step.traced.slack()
        for one in self.passes if math.isfinite(most) else ():
            front = one.alone(self.step, self._bound(self.trials.limit, most))
            if front:
                with suppress(BudgetError):
                    yield from self.among(front, one)

    def is_fast(self, one: ReportedTrial) -> bool:
        """Whether hardly anything is expected to be faster."""
        first = self.step.front[0]
        own = next((t for t in self.trials.tried if t.choice == first.choice), None)
        more = one.seconds - first.seconds
        if own is not None and own.step_seconds and one.step_seconds:
            more = one.step_seconds - own.step_seconds
        return more <= self.step.traced.slack()

    def among(
        self, front: Front, one: Searched | None = None, most: int = _MOST - _KEPT
    ) -> Search[ReportedTrial]:
        """The best of some candidates, and of what was tried, in `most` compiles."""
        rest, self._last = self._rest(front, one), front
        how = BudgetSearch(
            front,
            int(self.trials.limit),
            tuple(self.trials.tried),
            rest=rest,
            slack=self.step.traced.slack(),
            most=1 if self.quick else most,
            more=0 if self.quick else _MORE,
            free=self.free,
            undone=self.undone,
            uncertain=self._uncertain(front[-1].choice),
            between=self._between,
        )
        return (yield from how.search())

    def _rest(self, front: Front, one: Searched | None) -> float | None:
        """What peaks are expected to take above the bytes of a front's candidates.

        None where a candidate was compiled.
        """
        peaks = {t.choice: t.peak for t in self.trials.tried}
        if any(c.choice in peaks for c in front):
            return None
        if one is not None and one.whole_step:
            return self._above_prediction()
        # what other fronts took above their predictions, at least
        above = [peaks[c.choice] - c.bytes for c in self._last if c.choice in peaks]
        first = front[0]
        if above and _kinds(self._last) & _kinds(front):
            return min(above)
        # what their bytes are of need not be the same
        peak = self.step.traced.predicted(first.choice) + self._above_prediction()
        return peak - first.bytes

    def _first(self) -> Search[ReportedTrial]:
        error, looked_at = None, []
        for one, front in self._in_turn():
            if not front or front in looked_at:
                continue
            looked_at.append(front)
            try:
                self._found_by = one
                return (yield from self.among(front, one))
            except BudgetError as none:
                error = none
        assert error is not None
        raise error

    def _in_turn(self) -> Iterator[tuple[Searched | None, Front]]:
        """Fronts in which something is expected to fit, the fastest first; then all.

        Of each pass first the candidates that will do by predictions.
        """
        if not self._in_parts:
            yield None, self.step.front
        parts = [one for one in self.passes if not one.whole_step]
        fronts = [(one, self._within_limit(one)) for one in parts]
        expected = [(self._seconds(front, one), one, front) for one, front in fronts]
        for seconds, one, front in sorted(expected, key=lambda found: found[0]):
            if math.isfinite(seconds):
                yield one, front
        # asked once more: by then compiles have told how far predictions are off
        for one in self.passes:
            yield one, self._within_limit(one)
            yield one, one.candidates(self.step, self._bound(-math.inf))

    def _within_limit(self, one: Searched) -> Front:
        """The candidates of a pass that will do by predictions."""
        front = one.candidates(self.step, self._bound(self.trials.limit))
        asks = one.in_parts and any(_asks(one, c.choice) for c in front)
        if asks and one not in self._refining:
            self._refining.append(one)
            self.step = replace(self.step, refined=self._refined)
        return front

    def _seconds(self, front: Front, one: Searched | None = None) -> float:
        """Of the first candidate that is expected to fit; infinity if none is."""
        if not front:
            return math.inf
        limit = int(self.trials.limit)
        known = known_peaks((c.choice for c in front), self.trials.tried)
        peaks = Peaks(front, limit, known, self._rest(front, one))
        at = peaks.guess(-1, len(front))
        return front[at].seconds if peaks.expected(at) <= limit else math.inf

    def _faster(
        self, one: Searched, best: ReportedTrial, most: int
    ) -> Search[ReportedTrial]:
        """The best, or a candidate of a pass that takes less time."""
        most = max(most, len(self.trials.tried) + _KEPT)
        gain = self._gain(best, one.margin)
        like = [t for t in self.trials.tried if _asks(one, t.choice)]
        bound = self._bound(self.trials.limit, self._at_most(best, like) - gain)
        least = self.step.front[0].seconds
        front = one.candidates(self.step, bound) if bound.seconds > least else ()
        if one.whole_step:
            made = self.step.traced.rewritten(best.choice)
            self.notes = () if front else tuple(one.unreached(self.step, made))
        if self._seconds(front, one) >= bound.seconds:
            return best
        with suppress(BudgetError):
            return (yield from self.among(front, one, most))
        return best

    def _gain(self, best: ReportedTrial, margin: float = 0.0) -> float:
        """Seconds less than the best that are worth asking for."""
        own = best.step_seconds or self.step.traced.own_seconds()
        return max(self.step.traced.slack(), max(ENOUGH, margin) * own)

    def _at_most(
        self, best: ReportedTrial, like: Sequence[ReportedTrial] = ()
    ) -> float:
        """Predicted seconds of what may be as fast as the best.

        It is off from its prediction by as much as one of its like is, of all that was
        compiled where there are none.
        """
        off = least_off(like or self.trials.tried)
        if best.step_seconds is None or off is None:
            return best.seconds
        return best.step_seconds - off

    def _above_prediction(self) -> float:
        """Bytes that the plain step took above its predicted peak."""
        plain, unknown = Choice(self.step.target), self.step.traced.argument_bytes()
        return self._bound(self.trials.limit).above(plain, unknown)

    def _bound(self, limit: float, *less: float) -> TrialBound:
        return TrialBound(self.trials, self.step.traced.predicted, limit, *less)

    def _refined(self, front: Front) -> Front:
        """A front, together with what passes make of it that were asked before."""
        for one in self._refining:
            front = one.refined(self.step, front)
        return front

    def _uncertain(self, choice: Choice) -> int:
        """How many of the last candidates may be the least, by the last of them."""
        asked = (one.last for one in self.passes if _asks(one, choice))
        return max(asked, default=1)

    def _between(self, rich: Candidate, poor: Candidate) -> Between | None:
        found = (one.between(self.step, rich, poor) for one in self.passes)
        return next(filter(None, found), None)


def _kinds(front: Front) -> set[type]:
    """What any of the candidates asks for."""
    return {type(config) for one in front for config in one.choice.configs}


def _asks(one: Searched, choice: Choice) -> bool:
    """Whether a choice asks a pass for something."""
    return choice.get(one.config) != one.config()
