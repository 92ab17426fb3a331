"""A plan in sentences: the peak and the budget, then each pass with its bytes.

A line speaks of what was done: a pass that did nothing has none.
"""

import math
from collections.abc import Iterator

from jaxmem.memory import MemoryReport, format_bytes
from jaxmem.memory.report import sent_line
from jaxmem.scheduling.plan.data import PlanData
from jaxmem.scheduling.plan.rows import WHOLE_STEP

_SHORT = 1e-6  # seconds: 0.001 ms
_SCALARS = 1e-3  # of what is sent: sums of scalars that XLA combines otherwise


def headline(plan: PlanData) -> str:
    """The peak and the time before and after, and whether the budget is met."""
    return "; ".join(filter(None, (_peaks(plan), _seconds(plan), _budget(plan))))


def _seconds(plan: PlanData) -> str:
    """What a step is predicted to take; nothing for a chip without rates."""
    both = plan.plain, plan.scheduled
    told = [f"{1e3 * r.seconds:.4g} ms" if r and r.seconds else "?" for r in both]
    if told == ["?", "?"]:
        return ""
    before, after = told
    return f"predicted {f'{before} -> ' if before != '?' else ''}{after} a step"


def _peaks(plan: PlanData) -> str:
    devices = math.prod(size for _, size in plan.mesh)
    each = f" on each of {devices} devices" if devices > 1 else ""
    if not plan.target:
        size = format_bytes(plan.predicted_bytes)
        return f"predicted peak {size}{each}: name a target, and it is compiled"
    before, after = plan.plain, plan.scheduled
    text = f"{plan.target}: peak {_peak(before)}"
    if before is None or after is None:
        return f"{text} -> {_peak(after)}{each}"
    if before.peak_bytes == after.peak_bytes:
        return f"{text}{each}, as before"
    share = 100 * (1 - after.peak_bytes / before.peak_bytes)
    change = f"{abs(share):.2g} % {'less' if share > 0 else 'more'}"
    return f"{text} -> {_peak(after)}{each} ({change})"


def _budget(plan: PlanData) -> str:
    if plan.budget is None:
        return ""
    budget = f"budget {format_bytes(plan.budget)}"
    if plan.scheduled is None:
        return f"{budget}: not compiled" if not plan.target else f"{budget}: missed"
    left = plan.budget - plan.scheduled.peak_bytes
    if left >= 0:
        return f"{budget}: met, {format_bytes(left)} to spare"
    least = min((trial.peak for trial in plan.tried), default=math.inf)
    found = ""
    if not math.isinf(least):
        found = f", the lowest peak found is {format_bytes(int(least))}"
    return f"{budget}: missed by {format_bytes(-left)}{found}"


def _peak(report: MemoryReport | None) -> str:
    if report is None:
        return "that does not fit"
    size = format_bytes(report.peak_bytes)
    return size if fits(report) else f"{size} (does not fit)"


def fits(report: MemoryReport | None) -> bool:
    """Whether the chip has the memory; None stands for a step that it refused."""
    return report is not None and (report.memory_bytes is None or report.fits())


def done(plan: PlanData) -> list[str]:
    """A line for each pass that did something, what saves most bytes first."""
    lines = [*_kept_less(plan), *_in_parts(plan)]
    return [line for _, line in sorted(lines, key=lambda pair: -pair[0])]


Line = tuple[int, str]  # bytes, and what to say


def _kept_less(plan: PlanData) -> Iterator[Line]:
    if size := plan.released_bytes:
        count = count_of(sum(g.released for g in plan.gradients), "array")
        yield size, f"released: {format_bytes(size)} of gradients, {count}"
    size = plan.residual_bytes - plan.offloaded_bytes
    time = more_work(plan.recomputed_seconds)
    if size > 0 or plan.recomputed:
        kept = f"{format_bytes(size)} of residuals" if size > 0 else ""
        count = count_of(len(plan.recomputed), "operation") if plan.recomputed else ""
        work = f"{plan.recomputed_flops:.3g} flops" if plan.recomputed_flops else ""
        words = filter(None, (kept, count, work, time))
        yield max(0, size), f"recomputed: {', '.join(words)}"
    if size := plan.offloaded_bytes:
        where = "in host memory"
        yield size, f"offloaded: {format_bytes(size)} of residuals {where}"


def _in_parts(plan: PlanData) -> Iterator[Line]:
    """What runs in parts; of several regions the one that saves most has its bytes."""
    whole = [row for row in plan.tiles if row.path == WHOLE_STEP]
    heads = [row for row in plan.tiles if row.axis == "vocabulary"]
    others = [row for row in plan.tiles if row not in whole and row not in heads]
    for rows, name in (
        (whole, f"in {whole[0].n} micro-batches" if whole else ""),
        (heads, "in blocks of the vocabulary"),
        (others, "in tiles"),
    ):
        # regions run one after the other: what they save is not saved together
        size = max((row.bytes for row in rows), default=0)
        if not rows:
            continue
        count = "" if rows is whole else count_of(len(rows), "region")
        less = f"up to {format_bytes(size)} less while running" if size > 0 else ""
        time = more_work(sum(row.seconds for row in rows))
        yield size, f"{name}: {', '.join(filter(None, (less, count, time)))}"


def count_of(number: int, what: str) -> str:
    """The number and the word, in the plural where there are several."""
    return f"{number} {what}" + ("s" if number != 1 else "")


def more_work(seconds: float) -> str:
    """What operations add by their own seconds; empty where it rounds to nothing."""
    # no more is known of one choice alone: what it does not write and read again may
    # save as much, and the seconds of the compiled step have both
    return f"about {1e3 * seconds:.3g} ms more work" if seconds >= _SHORT else ""


def remarks(plan: PlanData) -> Iterator[str]:
    """What else there is to say."""
    if size := plan.kept_bytes:
        yield f"not released: {format_bytes(size)} of gradients; their rows say why"
    if plan.lower_bound and plan.scheduled:
        given = format_bytes(plan.lower_bound)
        yield f"{given} of the peak are arguments and results: a lower bound"
    if plan.target and plan.predicted_bytes:
        size = format_bytes(plan.predicted_bytes)
        yield f"{size} was predicted from the step's graph"
    if plan.plain and plan.scheduled and plan.scheduled.sent_bytes:
        yield from _sent(plan.plain, plan.scheduled)
    if plan.host_traffic_bytes:
        yield (
            f"{format_bytes(plan.host_traffic_bytes)} are copied to host memory and "
            f"back: the link of {plan.target or plan.choice.target} is busy for about "
            f"{1e3 * plan.host_seconds:.3g} ms a step"
        )
    if plan.barriers:
        count = count_of(plan.barriers, "optimization barrier")
        yield f"{count}, so that XLA keeps operations apart and in order"
    if plan.tried:
        compiles = count_of(len(plan.tried), "compile")
        yield f"the search took {compiles}, {plan.planning_seconds:.0f} s"
    yield from plan.notes


def _sent(plain: MemoryReport, scheduled: MemoryReport) -> Iterator[str]:
    """What a device sends in a step, and whether that is more than it was."""
    before, after = plain.sent_bytes, scheduled.sent_bytes
    yield f"{sent_line(scheduled)}; {format_bytes(before)} in the original step"
    if after > (1 + _SCALARS) * before:
        yield (
            f"that is {format_bytes(after - before)} more than in the original "
            "step: what is recomputed along an axis that is sharded over devices "
            "is sent again"
        )
