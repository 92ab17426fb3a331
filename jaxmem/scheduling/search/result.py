"""What a search for a budget tries, finds, or cannot reach."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxmem.auditing import AuditFinding, findings_of
from jaxmem.memory import MemoryReport, format_bytes
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._rewritten import Rewritten


class BudgetError(ValueError):
    """No choice fits into the budget; the message says what the least is.

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
      seconds: of recomputation, by the rates of the target.
    """

    choice: Choice
    peak: float
    predicted: float | None
    seconds: float


@dataclass(frozen=True)
class ReportedTrial(Trial):
    """The same with the compiler's report; None where it could not fit the chip.

    `findings`: what the compiler made of it that the step does not say.
    """

    report: MemoryReport | None
    findings: tuple[AuditFinding, ...] = ()

    @property
    def sent_bytes(self) -> float:
        """What a device sends; of what could not fit, as much as there may be."""
        return math.inf if self.report is None else self.report.sent_bytes

    def without_report(self) -> Trial:
        return Trial(self.choice, self.peak, self.predicted, self.seconds)


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
    return ReportedTrial(choice, peak, predicted, seconds, report, findings)


def wrong_values(trial: ReportedTrial) -> str:
    """What is wrong with a compiled step, the first of it."""
    advice = "if a check of the step on a device finds none, pass audit=False"
    return f"WRONG VALUES: {trial.findings[0]}\n    {advice}"


def by_peak(trial: ReportedTrial) -> tuple[float, bool]:
    """For sorting: of those that cannot be used, first those whose values are wrong."""
    return trial.peak, not trial.findings


def progress_of(best: ReportedTrial | None) -> str:
    if best is None or math.isinf(best.peak):
        return ""
    time = f", {1e3 * best.seconds:.3g} ms recomputed" if best.seconds else ""
    return f" (best so far {format_bytes(best.peak)}{time})"


def unreachable(
    budget: int, best: ReportedTrial, why: Sequence[str] = ()
) -> BudgetError:
    """The error for a budget that is below the least peak there is.

    `why`: sentences on what cannot be made less.
    """
    text = f"budget={format_bytes(budget)} cannot be reached: "
    if best.findings:
        return BudgetError(f"{text}{wrong_values(best)}")
    if best.report is None:
        text += "the compiler found no way to fit any choice into the chip"
        return BudgetError(text)
    rows = map(_described, sorted(best.report.at_peak, key=lambda h: -h.bytes)[:3])
    least = f"the least is {format_bytes(best.peak)}, of which the largest are\n  "
    text += least + "\n  ".join(rows) + "".join(f"\n{line}" for line in why)
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
    """The one with the fewest seconds of those that fit; None where none does."""
    fit = [t for t in tried if t.peak <= budget]
    return min(fit, key=lambda t: (t.seconds, t.peak), default=None)


def _described(holder: Any) -> str:
    what = holder.what if holder.kind == "temp" else f"{holder.kind} {holder.name}"
    words = holder.array, what, holder.module_path
    return " ".join([format_bytes(holder.bytes), *filter(None, words)])
