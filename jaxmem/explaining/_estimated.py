"""What a step takes, beside what a log says of it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxmem._bytes import format_bytes
from jaxmem.chips import Target, get_target, targets
from jaxmem.explaining._diagnosis import DEFAULT_SHARE, Diagnosis
from jaxmem.explaining._facts import Facts, LargeBuffer
from jaxmem.memory import DoesNotFit, MemoryReport, estimate
from jaxmem.memory.report.groups import groups_of

_LARGEST = 8


def estimated(
    step: Callable, args: tuple, target: str | Target | None, options: dict[str, Any]
) -> MemoryReport:
    """The report of a step.

    A TPU's compiler refuses a step that its chip has no memory for: then the report is
    that of the TPU with the most memory.
    """
    try:
        return estimate(step, *args, target=target, **options)
    except DoesNotFit:
        largest, chip = max(targets(), key=_memory_of_tpu), get_target(target)
        if chip.platform != "tpu" or chip.name == largest.name:
            raise
        return estimate(step, *args, target=largest, **options)


def with_report(facts: Facts, report: MemoryReport) -> Facts:
    """The figures of a log, with those of the step instead of its own."""
    aliased = report.alias_bytes
    own = {
        "program": report.name,
        "arguments": report.argument_bytes,
        "outputs": report.output_bytes,
        "shared": aliased,
        "largest": _largest(report),
    }
    if facts.stage != "compile" or facts.needed is None:
        own |= {"needed": report.peak_bytes, "temporaries_alone": False}
    if facts.limit is None and report.memory_bytes is not None:
        own |= {"limit": report.memory_bytes, "of_chip": True}
    return replace(facts, **own)


def diagnosed_again(diagnosis: Diagnosis, facts: Facts) -> Diagnosis:
    """The cause, where the log alone has not told it, or could not."""
    if diagnosis not in ("unknown", "live arrays", "true peak"):
        return diagnosis
    if facts.stage == "compile" or facts.limit is None:
        return diagnosis
    needed = facts.needed or 0
    if needed > facts.limit:
        return "true peak"
    by_default = facts.device == "GPU" and facts.of_chip
    beyond = by_default and needed > DEFAULT_SHARE * facts.limit
    return "pool limit" if beyond else "live arrays"


def compared(facts: Facts, report: MemoryReport) -> str:
    """Whether the step explains what was asked for."""
    parts = {
        "arguments": report.argument_bytes,
        "temporaries": report.temp_bytes,
        "outputs beside the arguments": report.output_bytes - report.alias_bytes,
    }
    summed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    whole = format_bytes(report.peak_bytes)
    sizes = f"{report.name} takes {whole} on {report.target}: {summed}"
    asked = facts.requested
    if asked is None:
        return f"{sizes}."
    size = format_bytes(asked)
    if abs(report.temp_bytes - asked) <= asked / 10:
        return f"{sizes}. The {size} that were asked for are its temporaries."
    if asked > report.temp_bytes + report.output_bytes:
        return (
            f"{sizes}. That is less than the {size} that were asked for: they are of "
            "another program, of other shapes, or of another version of this step."
        )
    return f"{sizes}. The {size} that were asked for are a part of that."


def _memory_of_tpu(target: Target) -> int:
    return (target.memory_bytes or 0) if target.platform == "tpu" else 0


def _largest(report: MemoryReport) -> tuple[LargeBuffer, ...]:
    rows = [
        LargeBuffer(
            row.bytes,
            row.buffer.array,
            row.what,
            group.label if row.buffer.kind == "temp" else "",
            row.source,
            count=row.count,
        )
        for group in groups_of(report)
        for row in group.rows
        if row.buffer.array
    ]
    return tuple(sorted(rows, key=lambda b: -b.bytes)[:_LARGEST])
