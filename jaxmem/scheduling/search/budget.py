"""The choice that fits into a budget, in few compiles.

The Pareto front predicts bytes and seconds, the compiler says what a step takes. A
prediction starts from the nearest candidate that was compiled, or lies between two that
were. Between the first candidate that fits and the one above it, as few layers as will
do take the lower one. The search ends where nothing better by `slack` may still fit.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._searched import Between, Candidate
from jaxmem.scheduling.search.asks import Ask, Search, foreseen
from jaxmem.scheduling.search.layers import in_few_layers
from jaxmem.scheduling.search.peaks import Peaks
from jaxmem.scheduling.search.result import ReportedTrial, best_of, by_peak, unreachable
from jaxmem.scheduling.search.traced_step import OFF

# Compiles for candidates above the first that was found to fit: by halves, 64 of them.
_BETTER = 6
# Of the budget, from which on a peak is compiled again with what costs nothing. No
# measurement says how much that may gain: a larger one costs compiles, and no more.
_GAINS = 1.3
# Of the budget: what fits and leaves more of it shows that predictions are off. Without
# that, 34 % of Llama was recomputed in 8,406 MiB, where a candidate with 11 % fits.
_CLOSE = 0.97
# Of the least peak, by which those differ that are compiled to find it: as little as
# the seconds (`ENOUGH`) that are not worth another compile.
_STEP = 0.01


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
      free: a configuration that costs nothing, and may help where little is missing.
      uncertain: how many of the last candidates may be the least, once compiled;
        infinity if any may.
      between: what lies between two candidates, if anything.
    """

    candidates: Sequence[Candidate]
    budget: int
    tried: Sequence[ReportedTrial] = ()
    rest: float | None = None
    slack: float = 0.0
    most: float = math.inf
    free: Any = None
    uncertain: float = 1
    between: Callable[[Candidate, Candidate], Between | None] = lambda *ends: None

    def search(self) -> Search[ReportedTrial]:
        """The choice with the fewest seconds whose compiled peak fits."""
        return foreseen(lambda: _BudgetRun(self).search(), self.budget)


class _Enough(Exception):
    """What was found will do."""


@dataclass
class _BudgetRun:
    """A search on its way."""

    asked: BudgetSearch
    tried: list[ReportedTrial] = field(init=False)
    peaks: Peaks = field(init=False)

    def __post_init__(self):
        asked = self.asked
        self.tried = list(asked.tried)
        known = {t.choice: t.peak for t in self.tried}
        numbered = enumerate(asked.candidates)
        known = {i: known[c.choice] for i, c in numbered if c.choice in known}
        self.peaks = Peaks(asked.candidates, asked.budget, known, asked.rest)

    def search(self) -> Search[ReportedTrial]:
        with suppress(_Enough):
            fits = yield from self._first_that_fits()
            fits = yield from self._nearby(fits)
            if fits > 0:
                yield from self._in_few_layers(fits)
        best = best_of(self.tried, self.asked.budget)
        assert best is not None
        return best

    def _first_that_fits(self) -> Search[int]:
        peaks, above, fits = self.peaks, -1, len(self.asked.candidates)
        at = peaks.guess(above, fits)
        while above + 1 < fits:
            if (yield from self._peak(at)) <= peaks.budget:
                fits = at
            else:
                above = at
            at = peaks.guess(above, fits)
            if at == fits:
                return fits
        if fits == len(peaks.candidates):
            yield from self._explore()
            fit = (i for i, peak in peaks.known.items() if peak <= peaks.budget)
            fits = min(fit, default=fits)
        if fits == len(peaks.candidates):
            raise unreachable(peaks.budget, min(self.tried, key=by_peak))
        return fits

    def _explore(self) -> Search[None]:
        """Compiles what may have the least peak, whatever the budget is."""
        every = range(len(self.asked.candidates))
        if math.isinf(self.asked.uncertain):
            yield from self._may_be_least(every)
        elif self.asked.uncertain > 1:
            for i in reversed(every[-int(self.asked.uncertain) :]):
                yield from self._either(i)

    def _may_be_least(self, every: range) -> Search[None]:
        # A sequence can take more than predicted: then one of which more was predicted
        # may take less. Looked at are, from the least on, all that would be below the
        # best if what they take above their prediction is the least that was seen. None
        # of this depends on the budget, and so the least does not.
        first = yield from self._peak(0)
        seen, last = Peaks(self.asked.candidates, 0, {0: first}), -math.inf
        for i in reversed(every):
            size, best = self.asked.candidates[i].bytes, min(seen.known.values())
            if seen.lowest(i) >= best:
                break
            if size - last >= _STEP * best:
                seen.known[i], last = (yield from self._either(i)), size

    def _either(self, i: int) -> Search[float]:
        """The compiled peak, with what costs nothing or without; for any budget."""
        candidate = self.asked.candidates[i]
        choices = [candidate.choice, *self._freely(candidate.choice)]
        tried = {t.choice for t in self.tried}
        for choice in choices:
            if choice not in tried:
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

    def _peak(self, i: int) -> Search[float]:
        known, candidate = self.peaks.known, self.asked.candidates[i]
        if i not in known:
            expected = self.peaks.expected(i) if known else None
            known[i] = yield from self._try(candidate, expected)
        return known[i]

    def _try(self, candidate: Candidate, expected: float | None) -> Search[float]:
        """The compiled peak; with what costs nothing, where that may help."""
        choice, seconds, budget = candidate.choice, candidate.seconds, self.asked.budget
        if self._helps():
            (choice,) = self._freely(choice)
            return (yield from self._compiled(choice, seconds, expected))
        peak = yield from self._compiled(choice, seconds, expected)
        is_last = peak > budget and choice == self.asked.candidates[-1].choice
        if may_gain(peak, budget) or is_last:
            for having in self._freely(choice):
                peak = min(peak, (yield from self._compiled(having, seconds, peak)))
        return peak

    def _freely(self, choice: Choice) -> Iterator[Choice]:
        """The same choice with what costs nothing, if there is that."""
        if self.asked.free is not None:
            yield choice.having(self.asked.free)

    def _helps(self) -> bool:
        """Whether a candidate fits only because of what costs nothing."""
        free, peaks = self.asked.free, {t.choice: t.peak for t in self.tried}
        having = [c for c in peaks if free is not None and free in c.configs]
        plain = {c: c.having(type(free)()) for c in having}
        fits = lambda choice: peaks.get(choice, 0.0) <= self.asked.budget
        return any(fits(c) and not fits(plain[c]) for c in having)

    def _compiled(
        self, choice: Choice, seconds: float, expected: float | None
    ) -> Search[float]:
        found = best_of(self.tried, self.asked.budget) is not None
        if found and len(self.tried) >= self.asked.most:
            raise _Enough
        self.tried.append((yield Ask(choice, seconds, expected)))
        return self.tried[-1].peak

    def _in_few_layers(self, low: int) -> Search[None]:
        """Candidate `low` in as few layers as will do, in the others one above."""
        asked, peaks = self.asked, self.peaks
        ends = ((i, asked.candidates[i]) for i in reversed(range(low)))
        found = ((i, asked.between(c, asked.candidates[low])) for i, c in ends)
        above, between = next((two for two in found if two[1] is not None), (0, None))
        if between is None:
            return
        taken = next(t.choice for t in self.tried if t.peak == peaks.known[low])
        free = () if asked.free is None else (taken.get(type(asked.free)),)
        compiled = lambda one, expected: self._compiled(
            one.choice.having(*free), one.seconds, expected
        )
        about = (peaks.expected(above), peaks.known[low]), asked.budget, asked.slack
        yield from in_few_layers(between, *about, compiled)


def may_gain(peak: float, budget: float) -> bool:
    """Whether it does not fit, but may with what costs nothing."""
    return budget < peak <= _GAINS * budget
