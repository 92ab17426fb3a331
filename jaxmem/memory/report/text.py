"""A report as plain text and as a rich table."""

from collections.abc import Sequence
from typing import Any

from jaxmem._bytes import format_bytes
from jaxmem.chips import is_timed
from jaxmem.memory.report.data import ReportData, fits_its_chip
from jaxmem.memory.report.groups import BufferGroup, BufferRow, groups_of
from jaxmem.memory.report.padded import padded_cell, padding_lines
from jaxmem.memory.report.sent import sent_lines
from jaxmem.memory.time.result import time_line

_GROUPS = 12  # that are printed
_ROWS = 8  # of each group
_WIDTH = 40  # of an operation or an argument's name


def headline(report: ReportData) -> str:
    """The step, its peak, and whether that fits the chip, in one line."""
    peak = f"{report.name}: peak {format_bytes(report.peak_bytes)}"
    if report.memory_bytes is None:
        return f"{peak} on {report.target}"
    left = report.memory_bytes - report.peak_bytes
    result = "fits" if left >= 0 else "does NOT fit"
    rest = f"{format_bytes(abs(left))} {'to spare' if left >= 0 else 'too much'}"
    memory = format_bytes(report.memory_bytes)
    return f"{peak} of {memory} on {report.target}: {result} ({rest})"


def sizes_line(report: ReportData) -> str:
    """The four numbers that the peak is the sum of, and the flops where known."""
    parts = [
        f"arguments {format_bytes(report.argument_bytes)}",
        f"temporaries {format_bytes(report.temp_bytes)}",
        f"outputs {format_bytes(report.output_bytes)}",
    ]
    if report.alias_bytes:
        parts.append(f"aliased with donated inputs {format_bytes(report.alias_bytes)}")
    if report.host_bytes:
        parts.append(f"in the host's memory {format_bytes(report.host_bytes)}")
    if report.cost.get("flops"):
        parts.append(f"{report.cost['flops']:.3g} flops")
    return " · ".join(parts)


def time_lines(report: ReportData) -> list[str]:
    """The predicted seconds in one line, or that the chip has no rates."""
    if report.time is None:
        known = is_timed(report.target)
        why = "module not read" if known else f"no rates for {report.target}"
        return [f"{why}: no seconds are predicted"]
    return [time_line(report.time)]


def as_text(report: ReportData) -> str:
    """What `print(report)` shows."""
    lines = [headline(report), f"  {sizes_line(report)}"]
    lines += [f"  {line}" for line in (*padding_lines(report), *time_lines(report))]
    lines += ["", "At the peak:"]
    groups = groups_of(report)
    wide = _widest_padded(groups)
    for group in groups[:_GROUPS]:
        lines.append(f"{format_bytes(group.bytes):>10}  {group.label}")
        shown = (row for row in group.rows[:_ROWS] if row.array or row.what)
        lines += [_line(row, wide) for row in shown]
        lines += _rest(group.rows[_ROWS:], "    ")
    lines += _rest(groups[_GROUPS:], "")
    lines += sent_lines(report)
    lines += _section("What to do:", report.advice)
    lines += _section("Notes:", report.notes)
    return "\n".join(lines)


def as_rich(report: ReportData) -> Any:
    """What `rich.print(report)` shows."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("%", justify="right")
    groups = groups_of(report)[:_GROUPS]
    padded = bool(_widest_padded(groups))
    if padded:
        table.add_column("without padding", no_wrap=True)
    table.add_column("buffer", overflow="fold")
    table.add_column("operation", overflow="fold")
    table.add_column("source", overflow="fold", style="dim")
    for group in groups:
        share = f"{100 * group.bytes / max(report.peak_bytes, 1):.1f}"
        cells = (format_bytes(group.bytes), share, *[""] * padded, escape(group.label))
        table.add_row(*cells, style="b")
        for row in group.rows[:_ROWS]:
            column = [padded_cell(row)] if padded else []
            cells = (*column, f"  {row.array}", row.what, row.source)
            table.add_row(format_bytes(row.bytes), "", *map(escape, cells))
    fits = fits_its_chip(report)
    blocks: list[Any] = [
        Text(headline(report), style="bold green" if fits else "bold red"),
        Text(sizes_line(report), style="dim"),
        *(
            Text(line, style="dim")
            for line in (*padding_lines(report), *time_lines(report))
        ),
        Text(""),
        table,
    ]
    blocks += [Text(line) for line in sent_lines(report)]
    for title, lines in (("What to do", report.advice), ("Notes", report.notes)):
        blocks += [Text(line) for line in _section(f"{title}:", lines)]
    return Group(*blocks)


def _widest_padded(groups: Sequence[BufferGroup]) -> int:
    """The width of the column of padding, of the rows that are shown."""
    shown = (row for group in groups[:_GROUPS] for row in group.rows[:_ROWS])
    return max((len(padded_cell(row)) for row in shown), default=0)


def _line(row: BufferRow, padded: int) -> str:
    what = row.what
    if len(what) > _WIDTH:  # the end of an argument's name says most
        named = row.buffer.kind != "temp"
        what = f"…{what[1 - _WIDTH :]}" if named else f"{what[: _WIDTH - 1]}…"
    cells = f"{row.array:<31} {what:<28} {row.source}"
    column = f"{padded_cell(row):<{padded}}  " if padded else ""
    return f"    {format_bytes(row.bytes):>10}  {column}{cells}".rstrip()


def _rest(rest: Sequence[BufferRow] | Sequence[BufferGroup], indent: str) -> list[str]:
    if not rest:
        return []
    size = format_bytes(sum(r.bytes for r in rest))
    return [f"{indent}{size:>10}  in {len(rest)} more"]


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", title, *(f"  - {line}" for line in lines)] if lines else []
