"""The choice that fits into a budget, in few compiles.

The Pareto front predicts bytes and seconds, the compiler says what a step takes. A
prediction starts from the nearest candidate that was compiled, or lies between two that
were. Between the first candidate that fits and the one above it, as few layers as will
do take the lower one. The search ends where nothing better by `slack` may still fit.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from jaxmem.memory import MemoryReport
from jaxmem.scheduling._candidate import Candidate
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling.order.ordered import OperationOrder
from jaxmem.scheduling.order.shrink_first import ShrinkFirst
from jaxmem.scheduling.recompute.first_layers import FirstLayers
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.recompute.segments_rewrite import InSegments
from jaxmem.scheduling.search.result import (
    BudgetError,
    ReportedTrial,
    best_of,
    by_peak,
    progress_of,
    trial_of,
    unreachable,
)
from jaxmem.scheduling.search.traced_step import OFF
from jaxmem.scheduling.tiling.tiled_front import cuts_of

_SHRINK_FIRST = ShrinkFirst(enabled=True)
_TRIES = 4  # compiles for the number of layers
_FINER = 0.5  # of the slack: it is tried in more layers for less than other candidates
_BETTER = 6  # compiles for candidates above the first that was found to fit
_SHRINKING = 1.3  # of the budget: what products that wait for others may gain
_CLOSE = 0.97  # of the budget: near enough
_LAST = 3  # candidates of the least prediction, where that is one of tiles
_STEP = 0.01  # of the least peak: sequences that differ by less are alike


Compile = Callable[[Choice], MemoryReport | None]


@dataclass
class BudgetSearch:
    """Candidates that were compiled, and what follows for the others."""

    candidates: Sequence[Candidate]  # by descending bytes and ascending seconds
    layers: int  # of the longest scans
    budget: int  # bytes
    compile: Compile  # from a choice to its report; None where nothing fits
    tell: Callable[[str], None]  # shows a line of progress
    can_shrink_first: bool = False  # whether products can wait for others
    # what was compiled, in order
    tried: list[ReportedTrial] = field(default_factory=list)
    # of whole candidates, by number
    peaks: dict[int, float] = field(default_factory=dict)
    rest: float | None = None  # a peak less the bytes kept, as another front had it
    slack: float = 0.0  # seconds that are not worth another compile
    audit: bool = True  # whether what the compiler made of a choice is looked at
    most: float = math.inf  # compiles, once something has been found to fit
    # seconds in which devices gather weights once more in first layers
    gathers: Callable[[FirstLayers], float] = lambda config: 0.0
    # told what is compiled now, and what probably next
    ahead: Callable[[Sequence[Choice]], None] = lambda choices: None

    def run(self) -> ReportedTrial:
        """The choice with the fewest seconds whose compiled peak fits."""
        self._start = list(self.tried), dict(self.peaks)
        with suppress(_Enough):
            self._look()
        best = best_of(self.tried, self.budget)
        assert best is not None
        return best

    def _look(self) -> None:
        first = self._nearby(self._first_that_fits())
        if first > 0 and self.layers > 1:
            self._in_first_layers(first)

    def _first_that_fits(self) -> int:
        above, fits = -1, len(self.candidates)
        at = self._guess(above, fits)
        while above + 1 < fits:
            if self._peak(at) <= self.budget:
                fits = at
            else:
                above = at
            at = self._guess(above, fits)
            if at == fits:
                return fits
        if fits == len(self.candidates):
            self._explore()
            fit = (i for i, peak in self.peaks.items() if peak <= self.budget)
            fits = min(fit, default=fits)
        if fits == len(self.candidates):
            raise unreachable(self.budget, min(self.tried, key=by_peak))
        return fits

    def _explore(self) -> None:
        """Compiles what may have the least peak, whatever the budget is."""
        # A sequence can take more than predicted: then one of which more was predicted
        # may take less. Looked at are, from the least on, all that would be below the
        # best if what they take above their prediction is the least that was seen. None
        # of this depends on the budget, and so the least does not.
        last = self.candidates[-1].choice
        if _is_cut(last):
            # XLA may not take the smallest tiles as they are predicted
            for i in reversed(range(len(self.candidates))[-_LAST:]):
                self._either(i)
        if not last.get(OperationOrder).sequence:
            return
        seen, last = {0: self._peak(0)}, -math.inf
        for i in reversed(range(len(self.candidates))):
            candidate, best = self.candidates[i], min(seen.values())
            above = (peak - self.candidates[k].bytes for k, peak in seen.items())
            lowest = candidate.bytes + min(filter(math.isfinite, above), default=0.0)
            if lowest >= best:
                break
            if candidate.bytes - last >= _STEP * best:
                seen[i], last = self._either(i), candidate.bytes

    def _either(self, i: int) -> float:
        """The compiled peak, with `ShrinkFirst` or without, whatever the budget."""
        candidate = self.candidates[i]
        choices = [candidate.choice]
        if self.can_shrink_first:
            choices.append(candidate.choice.having(_SHRINK_FIRST))
        tried = {t.choice for t in self.tried}
        for choice in choices:
            if choice not in tried:
                self._compiled(choice, candidate.seconds, self._expected(i))
        self.peaks[i] = min(t.peak for t in self.tried if t.choice in choices)
        return self.peaks[i]

    def _nearby(self, fits: int) -> int:
        """Candidates above that a prediction from afar has ruled out wrongly."""
        # The next one where it was ruled out narrowly. Where the candidate that fits
        # leaves much of the budget, predictions are off: then the one halfway to those
        # known not to fit.
        for _ in range(_BETTER):
            unfit = (i for i, peak in self.peaks.items() if peak > self.budget)
            above = max((i for i in unfit if i < fits), default=-1)
            if above + 1 == fits or self._gain(above + 1, fits) <= self.slack:
                break
            narrowly = self._expected(fits - 1) <= OFF * self.budget
            wasteful = self.peaks[fits] < _CLOSE * self.budget
            if not (narrowly or wasteful):
                break
            at = fits - 1 if narrowly else (above + fits) // 2
            if self._peak(at) <= self.budget:
                fits = at
        return fits

    def _gain(self, rich: int, poor: int) -> float:
        return self.candidates[poor].seconds - self.candidates[rich].seconds

    def _guess(self, above: int, fits: int) -> int:
        """The first candidate, between those known, that is expected to fit."""
        for i in range(above + 1, min(fits, len(self.candidates))):
            if self._expected(i) <= self.budget:
                return i
        return fits if fits < len(self.candidates) else len(self.candidates) - 1

    def _expected(self, i: int) -> float:
        if not self.peaks:
            return 0.0 if self.rest is None else self.candidates[i].bytes + self.rest
        known = [k for k, peak in self.peaks.items() if math.isfinite(peak)]
        if not known:
            return math.inf
        rich = max((k for k in known if k <= i), default=None)
        poor = min((k for k in known if k >= i), default=None)
        if rich is not None and poor is not None:
            ends = poor, rich  # np.interp wants them ascending
            kept = [self.candidates[k].bytes for k in ends]
            peaks = [self.peaks[k] for k in ends]
            return float(np.interp(self.candidates[i].bytes, kept, peaks))
        near = max(known) if poor is None else poor
        return self.peaks[near] + self.candidates[i].bytes - self.candidates[near].bytes

    def _peak(self, i: int) -> float:
        if i in self.peaks:
            return self.peaks[i]
        candidate = self.candidates[i]
        expected = self._expected(i) if self.peaks else None
        self.peaks[i] = self._try(candidate.choice, candidate.seconds, expected)
        return self.peaks[i]

    def _try(self, choice: Choice, seconds: float, expected: float | None) -> float:
        """The compiled peak; with products that wait for others where that may help."""
        if self._shrinks_first():
            return self._compiled(choice.having(_SHRINK_FIRST), seconds, expected)
        peak = self._compiled(choice, seconds, expected)
        is_near = may_shrink(peak, self.budget)
        is_last = peak > self.budget and choice == self.candidates[-1].choice
        if self.can_shrink_first and (is_near or is_last):
            choice = choice.having(_SHRINK_FIRST)
            peak = min(peak, self._compiled(choice, seconds, peak))
        return peak

    def _shrinks_first(self) -> bool:
        """Whether a candidate fits only because some products wait for others."""
        peaks = {t.choice: t.peak for t in self.tried}
        waits = [c for c in peaks if c.get(ShrinkFirst) == _SHRINK_FIRST]
        plain = {c: c.having(ShrinkFirst()) for c in waits}
        fits = lambda choice: peaks.get(choice, 0.0) <= self.budget
        return any(fits(c) and not fits(plain[c]) for c in waits)

    def _compiled(
        self, choice: Choice, seconds: float, expected: float | None
    ) -> float:
        best = best_of(self.tried, self.budget)
        if best is not None and len(self.tried) >= self.most:
            raise _Enough
        self.tell(f"compile {len(self.tried) + 1}{progress_of(best)}")
        self.ahead([choice, *self._following()])
        known = expected, seconds, self.audit
        self.tried.append(trial_of(choice, self.compile(choice), *known))
        return self.tried[-1].peak

    def _following(self) -> list[Choice]:
        """What is probably compiled after the next one; empty where it is the last."""
        # If that comes out as expected, else if it does not fit.
        tried, peaks = self._start
        for supposed in (None, self.budget + 1.0):
            fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
            search = _Lookahead(**fields | {"tried": list(tried), "peaks": dict(peaks)})
            search.known = {t.choice: t.peak for t in self.tried}
            search.supposed = supposed
            try:
                search.run()
            except _NextCompile as asked:
                return [asked.args[0]]
            except BudgetError:
                pass
        return []

    def _in_first_layers(self, low: int) -> None:
        """Tries as few layers as will do on candidate `low`, the others one above."""
        # What waits on the host, and segments, are for all layers, and so are tiles.
        poor = self.candidates[low]
        cuts = [cuts_of(one.choice) for one in self.candidates[: low + 1]]
        above = max((i for i in range(low) if cuts[i] == cuts[low]), default=None)
        if above is None:
            return
        rich = self.candidates[above]
        below = poor.choice.get(Recompute)
        if below.offload is not None or poor.choice.get(InSegments).sizes:
            return
        few, most = (0, self._expected(above)), (self.layers, self.peaks[low])
        taken = next(t.choice for t in self.tried if t.peak == self.peaks[low])
        for _ in range(_TRIES):
            layers = self._fewest(few, most)
            gain = (most[0] - few[0] - 1) / self.layers * self._gain(above, low)
            if layers is None or gain <= _FINER * self.slack:
                return
            fraction = layers / self.layers
            others = rich.choice.get(Recompute).rate
            first = FirstLayers(below.rate, fraction, others, _is_cut(poor.choice))
            kinds = first, Recompute(), taken.get(ShrinkFirst)
            choice = rich.choice.having(*kinds)
            seconds = rich.seconds + fraction * (poor.seconds - rich.seconds)
            seconds += self.gathers(first)
            peak = self._compiled(choice, seconds, self._line(few, most, layers))
            if few[0] == 0 and peak == few[1] > self.budget:
                return  # at their rate they recompute nothing that others do not
            if peak > self.budget:
                few = layers, peak
            else:
                most = layers, peak

    def _fewest(self, few: tuple[int, float], most: tuple[int, float]) -> int | None:
        """The least number of layers that should do; None where there is none left."""
        for layers in range(few[0] + 1, most[0]):
            if self._line(few, most, layers) <= self.budget:
                return layers
        return most[0] - 1 if few[0] + 1 < most[0] else None

    @staticmethod
    def _line(few: tuple[int, float], most: tuple[int, float], layers: int) -> float:
        if not math.isfinite(few[1]):
            few = few[0], 2 * most[1]
        share = (layers - few[0]) / (most[0] - few[0])
        return few[1] + share * (most[1] - few[1])


def may_shrink(peak: float, budget: float) -> bool:
    """Whether it does not fit, but may where products wait for others."""
    return budget < peak <= _SHRINKING * budget


def _is_cut(choice: Choice) -> bool:
    """Whether a choice asks for tiles."""
    return any(cuts != type(cuts)() for cuts in cuts_of(choice))


class _Enough(Exception):
    """What was found will do."""


class _NextCompile(Exception):
    """What a search would compile next."""


class _Lookahead(BudgetSearch):
    """A search gone through once more, to see what comes after its next compile."""

    known: dict[Choice, float]
    supposed: float | None  # the next compile's peak; as expected where None
    asked = False

    def _compiled(
        self, choice: Choice, seconds: float, expected: float | None
    ) -> float:
        peak = self.known.get(choice)
        if peak is None and self.asked:
            raise _NextCompile(choice)
        if peak is None:
            self.asked = True
            peak = expected if self.supposed is None else self.supposed
        peak = float(self.budget) if peak is None else peak
        self.tried.append(ReportedTrial(choice, peak, expected, seconds, None))
        return peak
