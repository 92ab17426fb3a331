"""The passes' candidates, one pass after the other, until something fits.

What fits first is taken; then each pass is asked for candidates that take less time.
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
from jaxmem.scheduling.search.result import BudgetError, ReportedTrial
from jaxmem.scheduling.search.trials import TrialBound, Trials

# Compiles for one budget, once something fits: what users wait for, and no measurement.
_MOST = 12
_KEPT = 2  # of them are kept for passes that change the whole step


@dataclass
class Fronts:
    """The candidates for one limit.

    Attributes:
      step: with its front of recomputation.
      passes: those that are asked, in this order.
      trials: what was compiled.
      free: a configuration that costs nothing, and is tried on what nearly fits.
      notes: why there were no candidates.
    """

    step: SearchedStep
    passes: Sequence[Searched]
    trials: Trials
    free: Any = None
    notes: tuple[str, ...] = ()
    _refining: list[Searched] = field(default_factory=list)
    _last: Front = ()  # the candidates of the last search

    def search(self) -> Search[ReportedTrial]:
        """What fits first, or what takes less time than that."""
        best = yield from self._first()
        if not best.seconds:
            return best
        made = self.step.traced.rewritten(best.choice)
        work = sum(row.flops for row in made.description.recomputed)
        inside = [one for one in reversed(self.passes) if not one.whole_step]
        for one in inside:
            best = yield from self._faster(one, best, work, _MOST - _KEPT)
        whole = [one for one in self.passes if one.whole_step]
        if whole:  # their price counts what products write, and so must that of others
            self.trials.take_longer(self.step.traced.writing)
            best = self.trials[best.choice]
        for one in whole:
            best = yield from self._faster(one, best, math.inf, _MOST)
        return best

    def among(
        self, front: Front, one: Searched | None = None, most: int = _MOST - _KEPT
    ) -> Search[ReportedTrial]:
        """The best of some candidates, and of what was tried, in `most` compiles."""
        peaks = {t.choice: t.peak for t in self.trials.tried}
        known = any(c.choice in peaks for c in front)
        # what other fronts took above their predictions, at least
        last, self._last = self._last, front
        above = [peaks[c.choice] - c.bytes for c in last if c.choice in peaks]
        if one is not None and one.whole_step:
            plain = Choice(self.step.target)
            unknown = self.step.traced.argument_bytes()
            above = [self._bound(self.trials.limit).above(plain, unknown)]
        how = BudgetSearch(
            front,
            int(self.trials.limit),
            tuple(self.trials.tried),
            rest=None if known else min(above, default=None),
            slack=self.step.traced.slack(),
            most=most,
            free=self.free,
            uncertain=self._uncertain(front[-1].choice),
            between=self._between,
        )
        return (yield from how.search())

    def _first(self) -> Search[ReportedTrial]:
        error, looked_at = None, []
        for one, front in self._in_turn():
            if not front or front in looked_at:
                continue
            looked_at.append(front)
            try:
                return (yield from self.among(front, one))
            except BudgetError as none:
                error = none
        assert error is not None
        raise error

    def _in_turn(self) -> Iterator[tuple[Searched | None, Front]]:
        """Candidates that will do by predictions, and then all, of each pass."""
        if not any(one.in_parts for one in self.passes):
            yield None, self.step.front
        for one in self.passes:
            front = one.candidates(self.step, self._bound(self.trials.limit))
            if one.in_parts and any(_asks(one, c) for c in front):
                self._refining.append(one)
                self.step = replace(self.step, refined=self._refined)
            yield one, front
            yield one, one.candidates(self.step, self._bound(-math.inf))

    def _faster(
        self, one: Searched, best: ReportedTrial, work: float, most: int
    ) -> Search[ReportedTrial]:
        """The best, or a candidate of a pass that takes less time."""
        traced = self.step.traced
        gain = max(traced.slack(), one.margin * traced.own_seconds())
        bound = self._bound(self.trials.limit, best.seconds - gain, work)
        front = one.candidates(self.step, bound) if bound.seconds > 0 else ()
        if one.whole_step:
            made = traced.rewritten(best.choice)
            self.notes = () if front else tuple(one.unreached(self.step, made))
        with suppress(BudgetError):
            return (yield from self.among(front, one, most)) if front else best
        return best

    def _bound(self, limit: float, *less: float) -> TrialBound:
        return TrialBound(self.trials, self.step.traced.predicted, limit, *less)

    def _refined(self, front: Front) -> Front:
        """A front, together with what passes make of it that were asked before."""
        for one in self._refining:
            front = one.refined(self.step, front)
        return front

    def _uncertain(self, choice: Choice) -> float:
        """How many of the last candidates may be the least, by the last of them."""
        numbers = (one.uncertain(choice.get(one.config)) for one in self.passes)
        return max(numbers, default=1)

    def _between(self, rich: Candidate, poor: Candidate) -> Between | None:
        found = (one.between(self.step, rich, poor) for one in self.passes)
        return next(filter(None, found), None)


def _asks(one: Searched, candidate: Candidate) -> bool:
    return candidate.choice.get(one.config) != one.config()
