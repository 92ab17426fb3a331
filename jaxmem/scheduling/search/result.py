"""What a search for a budget tries, finds, or cannot reach."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmem.auditing import AuditFinding, findings_of
from jaxmem.chips import is_timed
from jaxmem.memory import MemoryReport, format_bytes
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._rewritten import Rewritten


class BudgetError(ValueError):
    """No choice fits into the budget; the message says what the lowest peak is.

    Attributes:
      least: bytes of the least peak that was compiled; None where nothing compiled.
    """

    def __init__(self, message: str, least: int | None = None):
        super().__init__(message)
        self.least = least


@dataclass(frozen=True)
class Trial:
    """A choice that was compiled on the way to a budget.

    Attributes:
      choice: what the passes were asked to do.
      peak: its bytes; infinity where the compiler could not fit the chip at all, or
        made of it what computes something else.
      predicted: the bytes that were expected; None where nothing was known yet.
      seconds: beyond those of the step that keeps all, as its candidates predict them;
        negative if it is faster.
      step_seconds: of the whole step, as they are predicted for the compiled module;
        None for a chip without rates, and where it could not fit.
    """

    choice: Choice
    peak: float
    predicted: float | None
    seconds: float
    step_seconds: float | None = None


@dataclass(frozen=True)
class ReportedTrial(Trial):
    """The same with the compiler's report; None where it could not fit the chip.

    Attributes:
      report: of the compiled step.
      findings: what the compiler made of it that the step does not say.
      needed: bytes of a step that was refused, where the compiler tells.
    """

    report: MemoryReport | None = None
    findings: tuple[AuditFinding, ...] = ()
    needed: int | None = None

    @property
    def sent_bytes(self) -> float:
        """What a device sends; of what could not fit, as much as there may be."""
        return math.inf if self.report is None else self.report.sent_bytes

    def without_report(self) -> Trial:
        about = self.predicted, self.seconds, self.step_seconds
        return Trial(self.choice, self.peak, *about)


def trial_of(
    choice: Choice,
    report: MemoryReport | None,
    predicted: float | None = None,
    seconds: float = 0.0,
    audit: bool = True,
) -> ReportedTrial:
    """A choice with the compiler's report; None: it could not fit the chip."""
    findings = findings_of(report) if audit and report is not None else ()
    peak = math.inf if report is None or findings else report.peak_bytes
    # a module is read for its seconds where the chip has rates, and not for nothing
    time = None
    if report is not None and is_timed(report.target):
        time = report.seconds
    return ReportedTrial(choice, peak, predicted, seconds, time, report, findings)


def wrong_values(trial: ReportedTrial) -> str:
    """What is wrong with a compiled step, the first of it."""
    advice = "if a check of the step on a device finds none, pass audit=False"
    return f"WRONG VALUES: {trial.findings[0]}\n    {advice}"


def by_peak(trial: ReportedTrial) -> tuple[float, bool]:
    """For sorting: of those that cannot be used, first those whose values are wrong."""
    return trial.peak, not trial.findings


def by_peak_and_time(
    trials: Sequence[ReportedTrial],
) -> Callable[[ReportedTrial], tuple[float, bool]]:
    """For sorting these: bytes times seconds of the compiled step, where all have them.

    An order of operations that takes 1 % fewer bytes and 3 % longer is not worth it.
    """
    if not _timed(trials):
        return by_peak
    return lambda t: (t.peak * (t.step_seconds or 1.0), not t.findings)


def progress_of(best: ReportedTrial | None) -> str:
    if best is None or math.isinf(best.peak):
        return ""
    time = best.step_seconds
    time = "" if time is None else f", {1e3 * time:.4g} ms predicted"
    return f" (best so far {format_bytes(best.peak)}{time})"


def unreachable(
    budget: int, best: ReportedTrial, why: Sequence[str] | None = None
) -> BudgetError:
    """The error for a budget that is below the least peak there is.

    `why`: sentences on what cannot be made less, for who reads the message: it then has
    what is the largest at the peak, too. None: nobody does, another front may reach it.
    """
    text = f"budget={format_bytes(budget)} cannot be reached: "
    if best.findings:
        return BudgetError(f"{text}{wrong_values(best)}")
    if best.report is None:
        text += "the compiler found no way to fit any choice into the chip"
        return BudgetError(text)
    text += f"the lowest peak is {format_bytes(best.peak)}"
    if why is not None:
        largest = sorted(best.report.at_peak, key=lambda h: -h.bytes)[:3]
        rows = ", of which the largest are\n  " + "\n  ".join(map(_described, largest))
        text += rows + "".join(f"\n{line}" for line in why)
    return BudgetError(text, best.report.peak_bytes)


@dataclass(frozen=True)
class SearchResult:
    """The choice for some arguments, and what a search has seen on the way to it."""

    choice: Choice  # what the passes are asked to do
    budget: int | None = None  # bytes; None where none was given
    tried: tuple[ReportedTrial, ...] = ()  # what was compiled, in order
    seconds: float = 0.0  # that the search took
    rewritten: Rewritten | None = None  # the step under the choice
    report: MemoryReport | None = None  # of its compile
    fingerprint: str = ""  # tells the step from others
    # the option that all were compiled with, see `jaxmem.memory.Pending`
    products: int | None = None
    notes: tuple[str, ...] = ()  # how the search ended, where that is worth saying
    stopped: bool = False  # interrupted, or out of time: another may find more
    shardings: tuple[Any, ...] = ()  # of the step's arguments, where it is sharded


def best_of(
    tried: Sequence[ReportedTrial], budget: float = math.inf
) -> ReportedTrial | None:
    """The fastest of those that fit; None where none does."""
    fit = [t for t in tried if t.peak <= budget]
    return min(fit, key=by_time(fit), default=None)


def by_time(trials: Sequence[Trial]) -> Callable[[Trial], tuple[float, float]]:
    """For sorting these: seconds, of the compiled steps where they are known of all."""
    if not _timed(trials):
        return lambda t: (t.seconds, t.peak)
    return lambda t: (math.inf if t.step_seconds is None else t.step_seconds, t.peak)


def least_off(trials: Iterable[Trial]) -> float | None:
    """Seconds that compiled steps take above their predictions, at the least.

    None where the seconds of none are known.
    """
    times = ((t.step_seconds, t.seconds) for t in trials)
    off = (step - predicted for step, predicted in times if step is not None)
    return min(off, default=None)


def is_slower(one: ReportedTrial, other: ReportedTrial, slack: float) -> bool:
    """Whether it takes more than `slack` seconds longer, where both are known."""
    if one.step_seconds is None or other.step_seconds is None:
        return False
    return one.step_seconds > other.step_seconds + slack


def _timed(trials: Sequence[Trial]) -> bool:
    """Whether the seconds are known of every compiled step that fits its chip."""
    return all(t.step_seconds is not None for t in trials if math.isfinite(t.peak))


def _described(holder: Any) -> str:
    what = holder.what if holder.kind == "temp" else f"{holder.kind} {holder.name}"
    words = holder.array, what, holder.module_path
    return " ".join([format_bytes(holder.bytes), *filter(None, words)])
