"""A report as plain text and as a rich table."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jaxmem._bytes import format_bytes
from jaxmem._module_path import merge_numbered
from jaxmem.memory.buffers.rows import FRAGMENTATION, OTHERS, PeakBuffer

if TYPE_CHECKING:
    from jaxmem.memory.report.report import MemoryReport

_GROUPS = 12  # that are printed
_ROWS = 8  # of each group
_EXPLAINED = {
    FRAGMENTATION: "holes between live buffers, and padding",
    OTHERS: "buffers under 0.1 % of the peak each",
}


@dataclass(frozen=True)
class BufferRow:
    """Equal buffers: those of one shape, operation and source line."""

    buffer: PeakBuffer
    bytes: int
    count: int

    @property
    def array(self) -> str:
        times = f"{self.count} x " if self.count > 1 else ""
        return times + self.buffer.array

    @property
    def what(self) -> str:
        return _EXPLAINED.get(self.buffer.operation, self.buffer.what)

    @property
    def source(self) -> str:
        return os.path.basename(self.buffer.source)


@dataclass(frozen=True)
class BufferGroup:
    """The rows of one module path."""

    label: str
    bytes: int
    rows: tuple[BufferRow, ...]


def groups_of(buffers: Sequence[PeakBuffer]) -> list[BufferGroup]:
    """Buffers by module path and then by kind of buffer, largest first."""
    merged = merge_numbered(b.group for b in buffers)
    by_label: dict[str, dict[tuple, BufferRow]] = {}
    for b in buffers:
        rows = by_label.setdefault(merged[b.group], {})
        # the name of a temporary is XLA's: equal ones have different names
        name = b.name if b.kind != "temp" else ""
        key = (b.array, b.operation, b.opcode, b.source, b.kind, name)
        row = rows.get(key, BufferRow(b, 0, 0))
        rows[key] = replace(row, bytes=row.bytes + b.bytes, count=row.count + 1)
    groups = [
        BufferGroup(
            label,
            sum(row.bytes for row in rows.values()),
            tuple(sorted(rows.values(), key=lambda row: -row.bytes)),
        )
        for label, rows in by_label.items()
    ]
    return sorted(groups, key=lambda g: -g.bytes)


def headline(report: "MemoryReport") -> str:
    """Target, peak, and whether it fits, in one line."""
    peak = f"{report.name} on {report.target}: peak {format_bytes(report.peak_bytes)}"
    if report.memory_bytes is None:
        return peak
    left = report.memory_bytes - report.peak_bytes
    memory = format_bytes(report.memory_bytes)
    if left < 0:
        return f"{peak}, does NOT fit in {memory} ({format_bytes(-left)} too much)"
    return f"{peak}, fits in {memory} ({format_bytes(left)} to spare)"


def sizes_line(report: "MemoryReport") -> str:
    """The four numbers that the peak is the sum of, and the flops where known."""
    parts = [
        f"arguments {format_bytes(report.argument_bytes)}",
        f"outputs {format_bytes(report.output_bytes)}",
        f"temporaries {format_bytes(report.temp_bytes)}",
    ]
    if report.alias_bytes:
        parts.append(f"donated {format_bytes(report.alias_bytes)}")
    if report.host_bytes:
        parts.append(f"in the host's memory {format_bytes(report.host_bytes)}")
    if report.cost.get("flops"):
        parts.append(f"{report.cost['flops']:.3g} flops")
    return " · ".join(parts)


def as_text(report: "MemoryReport") -> str:
    """What `print(report)` shows."""
    lines = [headline(report), f"  {sizes_line(report)}", "", "At the peak:"]
    groups = groups_of(report.at_peak)
    for group in groups[:_GROUPS]:
        lines.append(f"{format_bytes(group.bytes):>10}  {group.label}")
        lines += [_line(row) for row in group.rows[:_ROWS] if row.array or row.what]
        lines += _rest(group.rows[_ROWS:], "    ")
    lines += _rest(groups[_GROUPS:], "")
    lines += _section("What to do:", report.advice)
    lines += _section("Notes:", report.notes)
    return "\n".join(lines)


def as_rich(report: "MemoryReport") -> Any:
    """What `rich.print(report)` shows."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("%", justify="right")
    table.add_column("buffer", overflow="fold")
    table.add_column("operation", overflow="fold")
    table.add_column("source", overflow="fold", style="dim")
    for group in groups_of(report.at_peak)[:_GROUPS]:
        share = f"{100 * group.bytes / max(report.peak_bytes, 1):.1f}"
        table.add_row(format_bytes(group.bytes), share, escape(group.label), style="b")
        for row in group.rows[:_ROWS]:
            cells = (f"  {row.array}", row.what, row.source)
            table.add_row(format_bytes(row.bytes), "", *map(escape, cells))
    fits = report.memory_bytes is None or report.fits()
    blocks: list[Any] = [
        Text(headline(report), style="bold green" if fits else "bold red"),
        Text(sizes_line(report), style="dim"),
        Text(""),
        table,
    ]
    for title, lines in (("What to do", report.advice), ("Notes", report.notes)):
        blocks += [Text(line) for line in _section(f"{title}:", lines)]
    return Group(*blocks)


def _line(row: BufferRow) -> str:
    what = row.what if len(row.what) <= 40 else f"{row.what[:39]}…"
    cells = f"{row.array:<31} {what:<28} {row.source}"
    return f"    {format_bytes(row.bytes):>10}  {cells}".rstrip()


def _rest(rest: Sequence[BufferRow | BufferGroup], indent: str) -> list[str]:
    if not rest:
        return []
    size = format_bytes(sum(r.bytes for r in rest))
    return [f"{indent}{size:>10}  in {len(rest)} more"]


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", title, *(f"  - {line}" for line in lines)] if lines else []
