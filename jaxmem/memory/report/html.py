"""A report as HTML for notebooks: a headline, a small picture, and foldable tables."""

from html import escape
from typing import TYPE_CHECKING

from jaxmem._bytes import format_bytes
from jaxmem.memory.report.plot import BASE, layers_of
from jaxmem.memory.report.text import BufferGroup, groups_of, headline, sizes_line

if TYPE_CHECKING:
    from jaxmem.memory.report.report import MemoryReport

_WIDTH, _HEIGHT = 640, 120
_OPEN = 3  # groups that are unfolded


def as_html(report: "MemoryReport") -> str:
    """What a notebook shows for a report."""
    fits = report.memory_bytes is None or report.fits()
    colour = "#1a7f37" if fits else "#c22"
    groups = groups_of(report.at_peak)
    return "".join(
        [
            "<div style='font-family:sans-serif'>",
            f"<b style='color:{colour}'>{escape(headline(report))}</b><br>",
            f"<small>{escape(sizes_line(report))}</small>",
            _picture(report),
            *(_group(g, report.peak_bytes, i < _OPEN) for i, g in enumerate(groups)),
            _list("What to do", report.advice),
            _list("Notes", report.notes),
            "</div>",
        ]
    )


def _group(group: BufferGroup, peak: int, opened: bool) -> str:
    share = 100 * group.bytes / max(peak, 1)
    rows = "".join(
        f"<tr><td style='text-align:right'>{format_bytes(row.bytes)}</td>"
        f"<td style='text-align:left'><code>{escape(row.array)}</code></td>"
        f"<td style='text-align:left'>{escape(row.what)}</td>"
        f"<td style='text-align:left'><code title='{escape(row.buffer.source)}'>"
        f"{escape(row.source)}</code></td></tr>"
        for row in group.rows
    )
    return (
        f"<details{' open' if opened else ''}><summary><b>{format_bytes(group.bytes)}"
        f"</b> ({share:.1f} %) {escape(group.label)}</summary>"
        f"<table style='margin-left:1em'>{rows}</table></details>"
    )


def _list(title: str, lines: tuple[str, ...]) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<b>{title}</b><ul>{items}</ul>"


def _picture(report: "MemoryReport") -> str:
    """Live bytes over the schedule, with arguments and outputs as a base."""
    if len(report.timeline) < 2:
        return ""
    layers = layers_of(report)
    count = len(report.timeline)
    base = [0] * count
    for module in BASE:
        sizes = layers.get(module, [0] * count)
        base = [b + n for b, n in zip(base, sizes, strict=True)]
    total = [step.bytes for step in report.timeline]
    return (
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' width='{_WIDTH}' "
        "role='img' style='display:block;max-width:100%'>"
        "<title>live bytes over the compiled schedule</title>"
        f"{_area(total, report, '#4269d0')}{_area(base, report, '#b8bec7')}</svg>"
    )


def _area(sizes: list[int], report: "MemoryReport", colour: str) -> str:
    across = max(report.timeline[-1].index, 1)
    points = [
        f"{_WIDTH * s.index / across:.1f},"
        f"{_HEIGHT * (1 - n / max(report.peak_bytes, 1)):.1f}"
        for s, n in zip(report.timeline, sizes, strict=True)
    ]
    outline = " ".join([f"0,{_HEIGHT}", *points, f"{_WIDTH},{_HEIGHT}"])
    return f"<polygon points='{outline}' fill='{colour}'/>"
