"""What devices send each other in a step, as rows and in one line."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jaxmem._bytes import format_bytes
from jaxmem.memory.buffers import Collective, sent_bytes
from jaxmem.memory.report.data import ReportData

SHOWN = 8  # rows that are printed
HEAD = ("sent", "by", "among", "times", "operation", "source")


@dataclass(frozen=True)
class SentRow:
    """Collectives of one kind that one line was compiled to."""

    kind: str
    devices: int
    found: tuple[Collective, ...]

    @property
    def bytes(self) -> int:
        """What a device sends by them in a step."""
        return sum(one.sent for one in self.found)

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        first = self.found[0]
        times = sum(one.times for one in self.found)
        often = "unknown" if any(not one.times for one in self.found) else str(times)
        file, _, place = first.source.rpartition("/")
        del file
        operation = first.operation.rsplit("/", 1)[-1]
        among = f"{self.devices} devices"
        return format_bytes(self.bytes), self.kind, among, often, operation, place


def sent_rows(report: ReportData) -> list[SentRow]:
    """The collectives of a step by kind and source line, what sends most first."""
    grouped: dict[tuple[str, int, str], list[Collective]] = {}
    for one in report.collectives:
        grouped.setdefault((one.kind, one.devices, one.source), []).append(one)
    rows = (SentRow(k, n, tuple(found)) for (k, n, _), found in grouped.items())
    return sorted(rows, key=lambda row: -row.bytes)


def sent_by_kind(report: ReportData) -> Counter[str]:
    """Bytes that a device sends in a step, by kind of collective."""
    found: Counter[str] = Counter()
    for one in report.collectives:
        found[one.kind] += one.sent
    return found


def sent_line(report: ReportData) -> str:
    """What a device sends in a step in all, and by what."""
    kinds = sent_by_kind(report).most_common()
    by = ", ".join(f"{format_bytes(size)} by {kind}" for kind, size in kinds if size)
    unknown = any(not one.times for one in report.collectives)
    least = "at least " if unknown else ""
    text = (
        f"a device sends {least}{format_bytes(sent_bytes(report.collectives))} a step"
    )
    return f"{text}: {by}" if by else text


def sent_lines(report: ReportData) -> list[str]:
    """What is printed of a report's collectives; nothing on one device."""
    rows = [row.cells() for row in sent_rows(report)[:SHOWN] if row.bytes]
    if not rows:
        return []
    return ["", f"Between devices: {sent_line(report)}", *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    size, kind, among, times, operation, source = cells
    often = f"{times} times"
    return f"{size:>10}  {kind:<18} {among}, {often:<10} {operation} {source}".rstrip()
