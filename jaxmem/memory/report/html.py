"""A report as HTML: a headline, memory over the schedule, the time, and tables."""

from collections.abc import Mapping

from jaxmem._bytes import format_bytes
from jaxmem.memory.report.chart import chart, legend, number_of, views
from jaxmem.memory.report.clock import clock
from jaxmem.memory.report.data import ReportData, fits_its_chip
from jaxmem.memory.report.groups import BufferGroup, groups_of
from jaxmem.memory.report.padded import padded_cell, padding_lines
from jaxmem.memory.report.plot import colours_of_reports
from jaxmem.memory.report.sent import HEAD as SENT_HEAD
from jaxmem.memory.report.sent import sent_line, sent_rows
from jaxmem.memory.report.text import headline, sizes_line
from jaxmem.pages import page
from jaxmem.pages.markup import Markup, tag, together

_OPEN = 3  # groups that are unfolded


def as_html(report: ReportData) -> Markup:
    """The body of a report's page."""
    colours = colours_of_reports([report])
    groups = groups_of(report)
    return together(
        page.headline(headline(report), fits_its_chip(report)),
        tag("p", sizes_line(report), class_="jm-faint"),
        *(tag("p", line, class_="jm-faint") for line in padding_lines(report)),
        charts({"": report}, colours),
        clock(report.time, colours),
        tag("h3", "At the peak"),
        *(
            _group(g, report.peak_bytes, colours, i < _OPEN)
            for i, g in enumerate(groups)
        ),
        _sent(report),
        page.lines("What to do", report.advice),
        page.lines("Notes", report.notes),
    )


def _sent(report: ReportData) -> Markup:
    """What devices send each other; nothing on one device."""
    rows = [row.cells() for row in sent_rows(report) if row.bytes]
    if not rows:
        return Markup()
    table = page.table(SENT_HEAD, rows, numbers=[0, 3])
    title = tag("h3", "Between devices")
    return together(title, tag("p", sent_line(report), class_="jm-faint"), table)


def charts(
    reports: Mapping[str, ReportData],
    colours: Mapping[str, str],
    budget: int | None = None,
) -> Markup:
    """Memory over the schedule of each report, beside each other, and one legend."""
    every = [*reports.values()]
    drawn = [chart(r, title, colours, every, budget) for title, r in reports.items()]
    if not any(drawn):
        return Markup()
    placed = any(report.placed for report in every)
    pictures = tag("div", *drawn, class_="jm-charts")
    return together(views() if placed else "", pictures, legend(colours, every))


def _group(
    group: BufferGroup, peak: int, colours: Mapping[str, str], opened: bool
) -> Markup:
    share = 100 * group.bytes / max(peak, 1)
    padded = any(map(padded_cell, group.rows))
    rows = [
        (
            format_bytes(row.bytes),
            *([padded_cell(row)] if padded else []),
            tag("code", row.array),
            row.what,
            tag("code", row.source, title=row.buffer.source),
        )
        for row in group.rows
    ]
    size = tag("b", format_bytes(group.bytes))
    summary = tag("summary", size, tag("span", f"{share:.1f} %"), group.label)
    return tag(
        "details",
        summary,
        page.table((), rows, numbers=[0]),
        open="" if opened else None,
        data_m=number_of(group.module, colours),
    )
