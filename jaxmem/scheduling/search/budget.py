"""The choice that fits into a budget, in few compiles.

The ladder of choices predicts bytes and seconds, the compiler says what a step takes.
A prediction starts from the nearest rung that was compiled and adds what the cuts
differ by, or lies between two that were, so that a second or third compile is usually
the last. Between the first rung that fits and the one above it, as few of the layers as
will do go by the lower. The search ends where nothing that may still fit is better by
more than `slack`. Where nothing fits, all that may have the least peak is compiled, so
that the least that is told is the same for every budget.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxmem.memory import MemoryReport, format_bytes
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling.search.front import Rung

_TRIES = 4  # compiles for the number of layers
_BETTER = 6  # compiles for rungs above the first that was found to fit
_NEAR = 1.1  # of the budget: a prediction may be wrong by that much
_WAITING = 1.3  # of the budget: what products that wait for others may gain
_CLOSE = 0.97  # of the budget: near enough
_STEP = 0.01  # of the least peak: sequences that differ by less are alike


class BudgetError(ValueError):
    """No choice fits into the budget; the message says what the least is.

    Attributes:
      least: bytes of the least peak that was compiled; None where nothing compiled.
    """

    def __init__(self, message: str, least: int | None = None):
        super().__init__(message)
        self.least = least


@dataclass(frozen=True)
class Compiled:
    """A choice that was compiled on the way to a budget.

    Attributes:
      choice: what was computed again.
      peak: its bytes; infinity where the compiler could not fit the chip at all.
      predicted: the bytes that were expected; None where nothing was known yet.
      seconds: of computing again, by the rates of the machine.
    """

    choice: Choice
    peak: float
    predicted: float | None
    seconds: float


@dataclass(frozen=True)
class Tried(Compiled):
    """The same with the compiler's report; None where it found no way."""

    report: MemoryReport | None

    def without_report(self) -> Compiled:
        """What a plan keeps of it."""
        return Compiled(self.choice, self.peak, self.predicted, self.seconds)


def compiled(
    choice: Choice,
    report: MemoryReport | None,
    predicted: float | None = None,
    seconds: float = 0.0,
) -> Tried:
    """A choice with what the compiler said, which may be that it found no way."""
    peak = math.inf if report is None else report.peak_bytes
    return Tried(choice, peak, predicted, seconds, report)


def saved(least: Tried | None) -> str:
    """The best so far, for a line of progress."""
    if least is None or math.isinf(least.peak):
        return ""
    again = f", {1e3 * least.seconds:.3g} ms again" if least.seconds else ""
    return f" (best so far {format_bytes(least.peak)}{again})"


def unreachable(budget: int, best: Tried) -> BudgetError:
    """The error for a budget that is below the least peak there is."""
    text = f"budget={format_bytes(budget)} cannot be reached: "
    if best.report is None:
        text += "the compiler found no way to fit any choice into the chip"
        return BudgetError(text)
    rows = map(_described, sorted(best.report.at_peak, key=lambda h: -h.bytes)[:3])
    least = f"the least is {format_bytes(best.peak)}, of which the largest are\n  "
    return BudgetError(text + least + "\n  ".join(rows), best.report.peak_bytes)


Compile = Callable[[Choice], MemoryReport | None]


def best_of(tried: Sequence[Tried], budget: float = math.inf) -> Tried | None:
    """The one with the fewest seconds of those that fit; None where none does."""
    fit = [t for t in tried if t.peak <= budget]
    return min(fit, key=lambda t: (t.seconds, t.peak), default=None)


@dataclass
class Search:
    """Rungs and parts of layers that were compiled, and what follows for the others.

    Attributes:
      rungs: by descending bytes and ascending seconds.
      layers: of the longest scans.
      budget: bytes.
      compile: from a choice to its report; None where nothing fits.
      tell: shows a line of progress.
      waits: whether products can wait for others.
      tried: what was compiled, in order.
      peaks: of whole rungs, by number.
      rest: a peak less the bytes kept, as another ladder had it.
      slack: seconds that are not worth another compile.
      ahead: told what is compiled now, and what probably next.
    """

    rungs: Sequence[Rung]
    layers: int
    budget: int
    compile: Compile
    tell: Callable[[str], None]
    waits: bool = False
    tried: list[Tried] = field(default_factory=list)
    peaks: dict[int, float] = field(default_factory=dict)
    rest: float | None = None
    slack: float = 0.0
    ahead: Callable[[Sequence[Choice]], None] = lambda choices: None

    def run(self) -> Tried:
        """The choice with the fewest seconds whose compiled peak fits."""
        self._start = list(self.tried), dict(self.peaks)
        first = self._nearby(self._first_that_fits())
        wasteful = self.peaks[first] < _CLOSE * self.budget
        if first > 0 and self.layers > 1 and wasteful:
            self._part(first)
        best = best_of(self.tried, self.budget)
        assert best is not None
        return best

    def _first_that_fits(self) -> int:
        above, fits = -1, len(self.rungs)
        at = self._guess(above, fits)
        while above + 1 < fits:
            if self._peak(at) <= self.budget:
                fits = at
            else:
                above = at
            at = self._guess(above, fits)
            if at == fits:
                return fits
        if fits == len(self.rungs):
            self._explore()
            fit = (i for i, peak in self.peaks.items() if peak <= self.budget)
            fits = min(fit, default=fits)
        if fits == len(self.rungs):
            raise unreachable(self.budget, min(self.tried, key=lambda t: t.peak))
        return fits

    def _explore(self) -> None:
        """Compiles what may have the least peak, whatever the budget is.

        A sequence can take more than predicted: then one of which more was predicted
        may take less. Looked at are, from the least on, all that would be below the
        best if what they take above their prediction is the least that was seen. None
        of this depends on the budget, and so the least does not.
        """
        if not self.rungs[-1].choice.sequence:
            return
        seen, last = {0: self._peak(0)}, -math.inf
        for i in reversed(range(len(self.rungs))):
            rung, best = self.rungs[i], min(seen.values())
            above = (peak - self.rungs[k].bytes for k, peak in seen.items())
            lowest = rung.bytes + min(filter(math.isfinite, above), default=0.0)
            if lowest >= best:
                break
            if rung.bytes - last >= _STEP * best:
                seen[i], last = self._either(i), rung.bytes

    def _either(self, i: int) -> float:
        """The compiled peak of a rung, products waiting or not, whatever the budget."""
        rung = self.rungs[i]
        ways = [rung.choice, *([replace(rung.choice, waits=True)] * self.waits)]
        tried = {t.choice for t in self.tried}
        for choice in ways:
            if choice not in tried:
                self._compiled(choice, rung.seconds, self._expected(i))
        self.peaks[i] = min(t.peak for t in self.tried if t.choice in ways)
        return self.peaks[i]

    def _nearby(self, fits: int) -> int:
        """Rungs above that a prediction from afar has ruled out wrongly.

        The next one where it was ruled out narrowly. Where the rung that fits leaves
        much of the budget, predictions are off: then the one halfway to those known not
        to fit.
        """
        for _ in range(_BETTER):
            unfit = (i for i, peak in self.peaks.items() if peak > self.budget)
            above = max((i for i in unfit if i < fits), default=-1)
            if above + 1 == fits or self._gain(above + 1, fits) <= self.slack:
                break
            narrowly = self._expected(fits - 1) <= _NEAR * self.budget
            wasteful = self.peaks[fits] < _CLOSE * self.budget
            if not (narrowly or wasteful):
                break
            at = fits - 1 if narrowly else (above + fits) // 2
            if self._peak(at) <= self.budget:
                fits = at
        return fits

    def _gain(self, rich: int, poor: int) -> float:
        """Seconds that one rung takes less than another."""
        return self.rungs[poor].seconds - self.rungs[rich].seconds

    def _guess(self, above: int, fits: int) -> int:
        """The first rung, between those known, that is expected to fit."""
        for i in range(above + 1, min(fits, len(self.rungs))):
            if self._expected(i) <= self.budget:
                return i
        return fits if fits < len(self.rungs) else len(self.rungs) - 1

    def _expected(self, i: int) -> float:
        if not self.peaks:
            return 0.0 if self.rest is None else self.rungs[i].bytes + self.rest
        known = [k for k, peak in self.peaks.items() if math.isfinite(peak)]
        if not known:
            return math.inf
        rich = max((k for k in known if k <= i), default=None)
        poor = min((k for k in known if k >= i), default=None)
        if rich is not None and poor is not None:
            ends = poor, rich  # np.interp wants them ascending
            kept = [self.rungs[k].bytes for k in ends]
            peaks = [self.peaks[k] for k in ends]
            return float(np.interp(self.rungs[i].bytes, kept, peaks))
        near = max(known) if poor is None else poor
        return self.peaks[near] + self.rungs[i].bytes - self.rungs[near].bytes

    def _peak(self, i: int) -> float:
        """The compiled peak of a rung."""
        if i in self.peaks:
            return self.peaks[i]
        rung = self.rungs[i]
        expected = self._expected(i) if self.peaks else None
        self.peaks[i] = self._try(rung.choice, rung.seconds, expected)
        return self.peaks[i]

    def _try(self, choice: Choice, seconds: float, expected: float | None) -> float:
        """The compiled peak; with products that wait for others where that may help."""
        peak = self._compiled(choice, seconds, expected)
        is_near = self.budget < peak <= _WAITING * self.budget
        is_last = peak > self.budget and choice == self.rungs[-1].choice
        if self.waits and (is_near or is_last):
            peak = min(peak, self._compiled(replace(choice, waits=True), seconds, peak))
        return peak

    def _compiled(
        self, choice: Choice, seconds: float, expected: float | None
    ) -> float:
        best = best_of(self.tried, self.budget)
        self.tell(f"compile {len(self.tried) + 1}{saved(best)}")
        self.ahead([choice, *self._following()])
        self.tried.append(compiled(choice, self.compile(choice), expected, seconds))
        return self.tried[-1].peak

    def _following(self) -> list[Choice]:
        """What is probably compiled after the next one; empty where it is the last.

        If that comes out as expected, else if it does not fit.
        """
        tried, peaks = self._start
        for supposed in (None, self.budget + 1.0):
            fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
            search = _Foreseen(**fields | {"tried": list(tried), "peaks": dict(peaks)})
            search.known = {t.choice: t.peak for t in self.tried}
            search.supposed = supposed
            try:
                search.run()
            except _AsksFor as asked:
                return [asked.args[0]]
            except BudgetError:
                pass
        return []

    def _part(self, low: int) -> None:
        """Tries as few layers as will do on rung `low`, the others one above.

        What waits on the host, and segments, are for all layers.

        Between a number of layers that is too few and one that will do, peaks are taken
        to lie on a straight line.
        """
        rich, poor = self.rungs[low - 1], self.rungs[low]
        if poor.choice.offload is not None or poor.choice.segments:
            return
        few, most = (0, self._expected(low - 1)), (self.layers, self.peaks[low])
        waits = next(t.choice.waits for t in self.tried if t.peak == self.peaks[low])
        for _ in range(_TRIES):
            turns = self._between(few, most)
            gain = (most[0] - few[0] - 1) / self.layers * self._gain(low - 1, low)
            if turns is None or gain <= self.slack:
                return
            part = turns / self.layers
            more = {"more": poor.choice.rate, "part": part, "waits": waits}
            choice = replace(rich.choice, **more)
            seconds = rich.seconds + part * (poor.seconds - rich.seconds)
            peak = self._compiled(choice, seconds, self._line(few, most, turns))
            if peak > self.budget:
                few = turns, peak
            elif peak >= _CLOSE * self.budget:
                return
            else:
                most = turns, peak

    def _between(self, few: tuple[int, float], most: tuple[int, float]) -> int | None:
        """The least number of layers that should do; None where there is none left."""
        for turns in range(few[0] + 1, most[0]):
            if self._line(few, most, turns) <= self.budget:
                return turns
        return most[0] - 1 if few[0] + 1 < most[0] else None

    @staticmethod
    def _line(few: tuple[int, float], most: tuple[int, float], turns: int) -> float:
        if not math.isfinite(few[1]):
            few = few[0], 2 * most[1]
        share = (turns - few[0]) / (most[0] - few[0])
        return few[1] + share * (most[1] - few[1])


class _AsksFor(Exception):
    """What a search would compile next."""


class _Foreseen(Search):
    """A search gone through once more, to see what comes after its next compile."""

    known: dict[Choice, float]
    supposed: float | None  # the next compile's peak; as expected where None
    asked = False

    def _compiled(
        self, choice: Choice, seconds: float, expected: float | None
    ) -> float:
        peak = self.known.get(choice)
        if peak is None and self.asked:
            raise _AsksFor(choice)
        if peak is None:
            self.asked = True
            peak = expected if self.supposed is None else self.supposed
        peak = float(self.budget) if peak is None else peak
        self.tried.append(Tried(choice, peak, expected, seconds, None))
        return peak


def _described(holder: Any) -> str:
    """Who holds bytes, in a line."""
    what = holder.what if holder.kind == "temp" else f"{holder.kind} {holder.name}"
    words = holder.array, what, holder.module_path
    return " ".join([format_bytes(holder.bytes), *filter(None, words)])
