"""A report as HTML: a headline, memory over the schedule, the time, and tables."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from jaxmem._bytes import format_bytes
from jaxmem.memory.report.chart import chart, legend, number_of, views
from jaxmem.memory.report.clock import clock
from jaxmem.memory.report.compare import HEAD, ComparedRow, ReportComparison
from jaxmem.memory.report.groups import BufferGroup, groups_of
from jaxmem.memory.report.plot import colours_of_reports
from jaxmem.memory.report.sent import HEAD as SENT_HEAD
from jaxmem.memory.report.sent import sent_line, sent_rows
from jaxmem.memory.report.text import headline, sizes_line
from jaxmem.pages import page
from jaxmem.pages.markup import Markup, tag, together

if TYPE_CHECKING:
    from jaxmem.memory.report.report import MemoryReport

_OPEN = 3  # groups that are unfolded


def as_html(report: "MemoryReport") -> Markup:
    """The body of a report's page."""
    colours = colours_of_reports([report])
    groups = groups_of(report)
    return together(
        page.headline(headline(report), report.memory_bytes is None or report.fits()),
        tag("p", sizes_line(report), class_="jm-faint"),
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


def _sent(report: "MemoryReport") -> Markup:
    """What devices send each other; nothing on one device."""
    rows = [row.cells() for row in sent_rows(report) if row.bytes]
    if not rows:
        return Markup()
    table = page.table(SENT_HEAD, rows, numbers=[0, 3])
    title = tag("h3", "Between devices")
    return together(title, tag("p", sent_line(report), class_="jm-faint"), table)


def compared_as_html(comparison: ReportComparison) -> Markup:
    """The body of a comparison's page; a module has one colour in both pictures."""
    when: tuple[str, ...] = ("before", "after")
    pairs = zip(when, comparison.reports, strict=False)
    reports: dict[str, MemoryReport] = dict(pairs)
    tables = [
        together(tag("h3", title.capitalize()), _compared_table(rows))
        for title, rows in comparison.sections.items()
    ]
    good = [r.memory_bytes is None or r.fits() for r in comparison.reports]
    before, after = good or (None, None)
    return together(
        page.headline(f"before: {comparison.before}", before),
        page.headline(f"after: {comparison.after}", after),
        charts(reports, colours_of_reports(comparison.reports)),
        *tables,
    )


def _compared_table(rows: Iterable[ComparedRow]) -> Markup:
    return page.table(HEAD, [row.cells() for row in rows], numbers=[1, 2, 3, 4])


def charts(reports: "Mapping[str, MemoryReport]", colours: Mapping[str, str]) -> Markup:
    """Memory over the schedule of each report, beside each other, and one legend."""
    every = [*reports.values()]
    drawn = [chart(r, title, colours, every) for title, r in reports.items()]
    if not any(drawn):
        return Markup()
    placed = any(report.placed for report in every)
    pictures = tag("div", *drawn, class_="jm-charts")
    return together(views() if placed else "", pictures, legend(colours, every))


def _group(
    group: BufferGroup, peak: int, colours: Mapping[str, str], opened: bool
) -> Markup:
    share = 100 * group.bytes / max(peak, 1)
    rows = [
        (
            format_bytes(row.bytes),
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
