"""The choice that fits into a budget, in few compiles.

The Pareto front predicts bytes and seconds, the compiled module says what a step takes
of both. A prediction starts from the nearest candidate that was compiled, or lies
between two that were. Between the first candidate that fits and the one above it, as
few layers as will do take the lower one. The search ends where nothing better by
`slack` may still fit, or where candidates such as those that it compiled take longer
than what was found before.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._searched import Between, Candidate
from jaxmem.scheduling.search.asks import Ask, Search, foreseen
from jaxmem.scheduling.search.layers import in_few_layers
from jaxmem.scheduling.search.peaks import Peaks, known_peaks
from jaxmem.scheduling.search.result import (
    ReportedTrial,
    best_of,
    by_peak,
    least_off,
    unreachable,
)
from jaxmem.scheduling.search.traced_step import OFF

# Compiles for candidates above the first that was found to fit: by halves, 64 of them.
_BETTER = 6
# Of the budget: what fits and leaves more of it shows that predictions are off. Without
# that, 34 % of Llama was recomputed in 8,406 MiB, where a candidate with 11 % fits.
_CLOSE = 0.97
# Of the seconds of a step: for so much users wait longer. Unrolled GPT-2 was left 3 %
# slower than it could be for a candidate that missed its budget by 0.4 %.
_WORTH = 0.02
# Of the budget, and bytes: what a few bytes less may bring within it.
_NEARLY = 0.02, 2**24


@dataclass(frozen=True)
class BudgetSearch:
    """A search among candidates.

    Attributes:
      candidates: by descending bytes and ascending seconds.
      budget: bytes.
      tried: what was compiled before.
      rest: a peak less the bytes kept, as another front had it.
      slack: seconds that are not worth another compile.
      most: compiles, once something has been found to fit.
      more: of them beyond, as long as one may be much faster.
      free: configurations that recompute nothing, each of which may help where nothing
        fits. They are not free of time: barriers that order a layer keep XLA from
        fusing.
      undone: those of `Searched.undone`, which may help where something nearly fits.
      uncertain: how many of the last candidates may be the least, once compiled.
      between: what lies between two candidates, if anything.
    """

    candidates: Sequence[Candidate]
    budget: int
    tried: Sequence[ReportedTrial] = ()
    rest: float | None = None
    slack: float = 0.0
    most: float = math.inf
    more: int = 0
    free: Sequence[Any] = ()
    undone: Sequence[Any] = ()
    uncertain: int = 1
    between: Callable[[Candidate, Candidate], Between | None] = lambda *ends: None

    def search(self) -> Search[ReportedTrial]:
        """The fastest choice whose compiled peak fits."""
        return foreseen(lambda: _BudgetRun(self).search(), self.budget)


class _Enough(Exception):
    """What was found will do."""


@dataclass
class _BudgetRun:
    """A search on its way."""

    asked: BudgetSearch
    tried: list[ReportedTrial] = field(init=False)
    peaks: Peaks = field(init=False)
    free: tuple[Any, ...] = ()  # what every candidate does besides

    def __post_init__(self):
        self.tried = list(self.asked.tried)
        self.peaks = self._peaks(self.asked.rest)

    def _peaks(self, rest: float | None) -> Peaks:
        asked = self.asked
        known = known_peaks(map(self._choice, asked.candidates), self.tried)
        return Peaks(asked.candidates, asked.budget, known, rest)

    def _choice(self, candidate: Candidate) -> Choice:
        return candidate.choice.having(*self.free)

    def search(self) -> Search[ReportedTrial]:
        with suppress(_Enough):
            fits = yield from self._first_that_fits()
            fits = yield from self._nearby(fits)
            yield from self._below(fits)
            if fits > 0:
                yield from self._in_few_layers(fits)
        best = best_of(self.tried, self.asked.budget)
        assert best is not None
        return best

    def _first_that_fits(self) -> Search[int]:
        count = len(self.asked.candidates)
        fits = yield from self._first_by_halves()
        for config in (*self.asked.free, *self.asked.undone):
            if fits == count and self._may_help(config):
                ends, of = self.peaks.known.items(), self.asked.candidates
                rest = min(peak - of[i].bytes for i, peak in ends)
                self.free = (config,)
                self.peaks = self._peaks(rest)
                fits = yield from self._first_by_halves()
        if fits == count:
            yield from self._explore()
            peaks = self.peaks
            fit = (i for i, peak in peaks.known.items() if peak <= peaks.budget)
            fits = min(fit, default=fits)
        if fits == count:
            raise unreachable(self.asked.budget, min(self.tried, key=by_peak))
        return fits

    def _may_help(self, config: Any) -> bool:
        """Whether no more than a few bytes are to be saved, by what saves no more."""
        share, few = _NEARLY
        nearly = self.peaks.budget + max(share * self.peaks.budget, few)
        return config in self.asked.free or min(self.peaks.known.values()) <= nearly

    def _first_by_halves(self) -> Search[int]:
        """The first candidate that fits; how many there are where none does."""
        peaks, above, fits = self.peaks, -1, len(self.asked.candidates)
        at = peaks.guess(above, fits)
        while above + 1 < fits:
            if (yield from self._peak(at)) <= peaks.budget:
                fits = at
            else:
                above = at
            at = peaks.guess(above, fits)
            if at == fits:
                break
        return fits

    def _explore(self) -> Search[None]:
        """Compiles what may have the least peak, whatever the budget is."""
        every = range(len(self.asked.candidates))
        if self.asked.uncertain > 1:
            for i in reversed(every[-self.asked.uncertain :]):
                yield from self._either(i)

    def _either(self, i: int) -> Search[float]:
        """The compiled peak, with what costs nothing or without; for any budget."""
        candidate = self.asked.candidates[i]
        choices = candidate.choice, self._choice(candidate)
        for choice in choices:  # the same one twice, where nothing costs nothing
            if all(t.choice != choice for t in self.tried):
                expected = self.peaks.expected(i)
                yield from self._compiled(choice, candidate.seconds, expected)
        peak = min(t.peak for t in self.tried if t.choice in choices)
        self.peaks.known[i] = peak
        return peak

    def _nearby(self, fits: int) -> Search[int]:
        """Candidates above that a prediction from afar has ruled out wrongly."""
        # The next one where it was ruled out narrowly. Where the candidate that fits
        # leaves much of the budget, predictions are off: then the one halfway to those
        # known not to fit.
        peaks = self.peaks
        for _ in range(_BETTER):
            above = peaks.unfit(fits)
            if above + 1 == fits or peaks.gain(above + 1, fits) <= self.asked.slack:
                break
            narrowly = peaks.expected(fits - 1) <= OFF * peaks.budget
            wasteful = peaks.known[fits] < _CLOSE * peaks.budget
            if not (narrowly or wasteful):
                break
            at = fits - 1 if narrowly else (above + fits) // 2
            if (yield from self._peak(at)) <= peaks.budget:
                fits = at
        return fits

    def _below(self, fits: int) -> Search[None]:
        """Candidates that keep less, as long as they are faster than what was found.

        They are predicted to take longer, but what was found may take longer than was
        predicted of it: where layers wait for the host, say.
        """
        for i in range(fits + 1, len(self.asked.candidates)):
            best = best_of(self.tried, self.asked.budget)
            if best is None or best.step_seconds is None or not self._gains(i, best):
                return
            yield from self._peak(i)
            if best_of(self.tried, self.asked.budget) is best:
                return

    def _gains(self, i: int, best: ReportedTrial) -> bool:
        """Whether it saves time worth a compile, if it is off as its like are."""
        one = self.asked.candidates[i]
        late = one.seconds + self.asked.slack
        like = self._like(self._choice(one)) or self._own
        return not _takes_longer(late, like, best)

    def _peak(self, i: int) -> Search[float]:
        known, candidate = self.peaks.known, self.asked.candidates[i]
        if i not in known:
            expected = self.peaks.expected(i) if known else None
            about = candidate.seconds, expected
            known[i] = yield from self._compiled(self._choice(candidate), *about)
        return known[i]

    def _compiled(
        self, choice: Choice, seconds: float, expected: float | None
    ) -> Search[float]:
        best = best_of(self.tried, self.asked.budget)
        if best is not None:
            like = self._like(choice)
            late = _takes_longer(seconds, like, best)
            if late or self._is_enough(seconds, like, best):
                raise _Enough
        self.tried.append((yield Ask(choice, seconds, expected)))
        return self.tried[-1].peak

    def _is_enough(
        self, seconds: float, like: Sequence[ReportedTrial], best: ReportedTrial
    ) -> bool:
        """Whether as many were compiled as what may be gained is worth."""
        over = len(self.tried) - self.asked.most
        if over < 0 or over >= self.asked.more or best.step_seconds is None:
            return over >= 0
        # off as its like are, or else as the best is
        enough = _WORTH * best.step_seconds
        return _takes_longer(seconds + enough, like or [best], best)

    @property
    def _own(self) -> list[ReportedTrial]:
        """What was compiled here."""
        return self.tried[len(self.asked.tried) :]

    def _like(self, choice: Choice) -> list[ReportedTrial]:
        """Of that, what asks the same passes for something."""
        return [t for t in self._own if _kinds(t.choice) == _kinds(choice)]

    def _in_few_layers(self, low: int) -> Search[None]:
        """Candidate `low` in as few layers as will do, in the others one above."""
        asked, peaks = self.asked, self.peaks
        ends = ((i, asked.candidates[i]) for i in reversed(range(low)))
        found = ((i, asked.between(c, asked.candidates[low])) for i, c in ends)
        above, between = next((two for two in found if two[1] is not None), (0, None))
        if between is None:
            return
        taken = next(t.choice for t in self.tried if t.peak == peaks.known[low])
        kinds = map(type, (*asked.free, *asked.undone))
        free = [taken.get(kind) for kind in kinds]
        compiled = lambda one, expected: self._compiled(
            one.choice.having(*free), one.seconds, expected
        )
        about = (peaks.expected(above), peaks.known[low]), asked.budget, asked.slack
        yield from in_few_layers(between, *about, compiled)


def _takes_longer(
    seconds: float, like: Sequence[ReportedTrial], best: ReportedTrial
) -> bool:
    """Whether it takes longer than the best, if it is off as its like are."""
    off = least_off(like)
    if best.step_seconds is None or off is None:
        return False
    return seconds + off > best.step_seconds


def _kinds(choice: Choice) -> set[type]:
    """The passes that it asks for something."""
    return set(map(type, choice.configs))
