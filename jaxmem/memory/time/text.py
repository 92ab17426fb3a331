"""Predicted seconds as text: one line of a report, and the table of `report.time`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxmem.memory.time.step_time import OperationTime, StepTime

_LEAST = 0.005  # shares below it are not printed
_MODULES = 12  # rows that are printed
_OPERATIONS = 16
HEAD = ("ms", "%", "times", "waits for", "operation", "module", "source")


def milliseconds(seconds: float) -> str:
    """Seconds as "41.7 ms"."""
    ms = 1e3 * seconds
    return f"{ms:.3g} ms" if abs(ms) < 100 else f"{ms:.0f} ms"


def time_line(time: "StepTime") -> str:
    """The predicted seconds and their shares, in one line."""
    parts = [
        f"{name} {100 * seconds / time.seconds:.0f} %"
        for name, seconds in time.by_bound
        if seconds >= _LEAST * time.seconds
    ]
    text = f"predicted {milliseconds(time.seconds)} a step: {', '.join(parts)}"
    return f"{text}; MFU {100 * time.mfu:.0f} %, HFU {100 * time.hfu:.0f} %"


def table(time: "StepTime") -> str:
    """What `print(report.time)` shows."""
    lines = [time_line(time), f"  {time.kernels} kernels", "", "By module:"]
    lines += [
        f"{milliseconds(seconds):>10}  {100 * seconds / time.seconds:4.1f} %  {module}"
        for module, seconds in time.by_module[:_MODULES]
    ]
    rows = [HEAD, *(cells(row, time) for row in time.operations[:_OPERATIONS])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["", "The slowest operations:"]
    lines += [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    lines += [f"  - {note}" for note in time.notes]
    return "\n".join(line.rstrip() for line in lines)


def cells(row: "OperationTime", time: "StepTime") -> tuple[str, ...]:
    """A row of the table."""
    share = f"{100 * row.seconds / time.seconds:.1f}"
    what = f"{row.what} (backward)" if row.backward else row.what
    ms, times = f"{1e3 * row.seconds:.3f}", str(row.times)
    return ms, share, times, row.bound, what, row.module, row.source
