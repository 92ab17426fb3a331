"""Two results side by side: totals, and bytes by module and by kind."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from jaxmem._bytes import format_bytes
from jaxmem._module_path import merge_numbered
from jaxmem.memory.buffers import sent_bytes
from jaxmem.memory.buffers.rows import FRAGMENTATION, OTHERS, PeakBuffer
from jaxmem.memory.report.data import ReportData, fits_its_chip
from jaxmem.memory.report.sent import sent_by_kind
from jaxmem.memory.time.result import milliseconds
from jaxmem.pages import SavedResult, aligned

_SHOWN = 16  # rows of a section that are printed
HEAD = ("", "before", "after", "difference", "%")


@dataclass(frozen=True)
class ComparedRow:
    """Bytes, predicted seconds or a count of one thing before and after.

    Attributes:
        name: what it is: "peak", a module path, a kind of arrays.
        before: in its unit.
        after: in its unit.
        unit: "bytes", "seconds", or "count" of a number of instructions.
    """

    name: str
    before: float
    after: float
    unit: str = "bytes"

    @property
    def difference(self) -> float:
        """How much more than before; negative where less is taken."""
        return self.after - self.before

    def cells(self) -> tuple[str, ...]:
        """The row as text, with signs."""
        sizes = map(self._text, (self.before, self.after))
        if abs(self.difference) < 1e-12:  # seconds are sums in two orders
            return (self.name, *sizes, self._text(0), "")
        sign = "+" if self.difference > 0 else ""
        difference, share = f"{sign}{self._text(self.difference)}", "new"
        if self.before:
            share = f"{100 * self.difference / self.before:+.1f} %"
        return (self.name, *sizes, difference, share)

    def _text(self, amount: float) -> str:
        if self.unit == "seconds":
            return milliseconds(amount)
        return str(int(amount)) if self.unit == "count" else format_bytes(int(amount))


@dataclass(frozen=True)
class ReportComparison(SavedResult):
    """What `report.compare(other)` returns; prints as a table.

    Attributes:
        before: the headline of the first result.
        after: the headline of the second.
        sections: title -> rows; those of modules and kinds with the largest difference
            first.
        reports: the two memory reports, whose pictures a page shows; empty where other
            results are compared.
        notes: sentences about both.
        budget: bytes that a page's pictures mark with a line; or None.
    """

    before: str
    after: str
    sections: dict[str, tuple[ComparedRow, ...]]
    reports: tuple[ReportData, ...] = ()
    notes: tuple[str, ...] = ()
    budget: int | None = None

    def to_json(self, indent: int | None = None) -> str:
        """Headlines and rows as JSON text; bytes are integers."""
        rows = {title: [*map(asdict, rows)] for title, rows in self.sections.items()}
        fields = {"before": self.before, "after": self.after, "sections": rows}
        return json.dumps(fields | {"notes": self.notes}, indent=indent)

    def plot(self, path: Any) -> None:
        """Draws live bytes over the schedule, before and after, on one scale.

        Args:
            path: the image to write; its suffix says the format (.png, .svg, .pdf).

        Raises:
            ImportError: matplotlib is not installed (extra `plot`).
            ValueError: the results have no schedule to draw.
        """
        from jaxmem.memory.report.plot import plot_both

        if not self.reports:
            raise ValueError("nothing to draw: only reports of `estimate` are drawn")
        before, after = self.reports
        plot_both(before, after, path, budget=self.budget)

    def __str__(self) -> str:
        table = [HEAD, *(row for _, rows in self._shown() for row in rows)]
        head, *body = (f"  {line}" for line in aligned(table, range(1, len(HEAD))))
        lines = [f"before: {self.before}", f"after:  {self.after}", "", head]
        for title, rows in self._shown():
            lines += [title, *body[: len(rows)]]
            body = body[len(rows) :]
        return "\n".join([*lines, *(f"- {note}" for note in self.notes)])

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table
        from rich.text import Text

        table = Table(*HEAD, box=None, header_style="bold")
        table.columns[0].overflow = "fold"
        for column in table.columns[1:]:
            column.justify = "right"
        for title, rows in self._shown():
            table.add_row(escape(title), style="bold")
            for row in rows:
                style = "green" if row[3].startswith("-") else None
                table.add_row(*map(escape, row), style=style)
        heads = f"before: {self.before}\nafter:  {self.after}\n"
        return Group(Text(heads), table, *(Text(f"- {n}") for n in self.notes))

    def _shown(self) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
        for title, rows in self.sections.items():
            shown = [row.cells() for row in rows[:_SHOWN]]
            if rest := rows[_SHOWN:]:
                sums = sum(r.before for r in rest), sum(r.after for r in rest)
                left = ComparedRow(f"{len(rest)} more", *sums, rest[0].unit)
                shown.append(left.cells())
            yield title, shown

    def _html(self) -> tuple[str, Any]:
        return f"{self.before} | {self.after}", _as_html(self)


def compare_reports(before: ReportData, after: ReportData) -> ReportComparison:
    """The comparison of two reports of `estimate`."""
    from jaxmem.memory.report.text import headline

    totals = {
        "peak": "peak_bytes",
        "arguments": "argument_bytes",
        "temporaries": "temp_bytes",
        "outputs": "output_bytes",
        "in donated arguments": "alias_bytes",
        "in the host's memory": "host_bytes",
    }
    pair = before, after
    rows = [ComparedRow(n, *(getattr(r, f) for r in pair)) for n, f in totals.items()]
    sent_before, sent_after = (sent_bytes(report.collectives) for report in pair)
    rows.append(ComparedRow("sent to other devices", sent_before, sent_after))
    kinds = [_counted((_kind(b), b.bytes) for b in r.at_peak) for r in (before, after)]
    modules = _modules(before, after)
    sent = compared(*map(sent_by_kind, (before, after)))
    return ReportComparison(
        headline(before),
        headline(after),
        {
            "totals": tuple(r for r in rows if r.before or r.after),
            "at the peak, by module": compared(*modules),
            "at the peak, by kind": compared(*kinds),
        }
        | ({"sent by a device in a step": sent} if sent else {})
        | _times(before, after)
        | _appeared_and_gone(before, after)
        | _instructions(before, after),
        (before, after),
    )


def _times(before: ReportData, after: ReportData) -> dict[str, tuple[ComparedRow, ...]]:
    """Predicted seconds, of the step and its parts; nothing for chips without rates."""
    if before.time is None or after.time is None:
        return {}
    times = before.time, after.time
    step = ComparedRow("step", before.time.seconds, after.time.seconds)
    bounds = compared(*(dict(t.by_bound) for t in times))
    names = merge_numbered(module for t in times for module, _ in t.by_module)
    modules = [_counted((names[m], s) for m, s in t.by_module) for t in times]
    sections = {
        "predicted time, by what is waited for": (step, *bounds),
        "predicted time, by module": compared(*modules),
    }
    timed = lambda rows: tuple(replace(row, unit="seconds") for row in rows)
    return {title: timed(rows) for title, rows in sections.items()}


def _appeared_and_gone(*reports: ReportData) -> dict[str, tuple[ComparedRow, ...]]:
    """Buffers at the peak, by module and operation, that one report has alone."""
    from jaxmem.memory.report.groups import groups_of

    rows = compared(
        *(
            _counted(
                (f"{g.module}: {row.what} {row.buffer.array}", row.bytes)
                for g in groups_of(report)
                for row in g.rows
                if row.buffer.array
            )
            for report in reports
        )
    )
    sections = {
        "appeared at the peak": tuple(r for r in rows if not r.before),
        "gone from the peak": tuple(r for r in rows if not r.after),
    }
    return {title: found for title, found in sections.items() if found}


def _instructions(*reports: ReportData) -> dict[str, tuple[ComparedRow, ...]]:
    """The compiled instructions whose number differs; none where a report has none."""
    if not all(report.instructions for report in reports):
        return {}
    counts = [_counted((i.label, i.count) for i in r.instructions) for r in reports]
    rows = (replace(r, unit="count") for r in compared(*counts) if r.difference)
    found = tuple(rows)
    return {"compiled instructions": found} if found else {}


def _modules(*reports: ReportData) -> list[Counter[str]]:
    from jaxmem.memory.report.groups import groups_of

    return [_counted((g.module, g.bytes) for g in groups_of(r)) for r in reports]


def _kind(buffer: PeakBuffer) -> str:
    if buffer.operation in (FRAGMENTATION, OTHERS):
        return "small buffers and holes"
    if buffer.kind != "temp":
        return f"{buffer.kind}s"
    which = "backward" if buffer.backward else "forward"
    return f"temporaries of the {which} pass"


def _counted(pairs: Iterable[tuple[str, Any]]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for name, size in pairs:
        counts[name] += size
    return counts


def compared(
    before: Mapping[Any, float], after: Mapping[Any, float]
) -> tuple[ComparedRow, ...]:
    """Rows by name, those with the largest difference first."""
    names = dict.fromkeys([*before, *after])
    rows = [ComparedRow(n, before.get(n, 0), after.get(n, 0)) for n in names]
    return tuple(sorted(rows, key=lambda r: (-abs(r.difference), -r.before)))


def _as_html(comparison: ReportComparison) -> Any:
    """The body of a comparison's page; a module has one colour in both pictures."""
    from jaxmem.memory.report.html import charts
    from jaxmem.memory.report.plot import colours_of_reports
    from jaxmem.pages import page
    from jaxmem.pages.markup import tag, together

    titles: list[str] = ["before", "after"]
    reports = dict(zip(titles, comparison.reports, strict=False))
    tables = [
        together(
            tag("h3", title.capitalize()),
            page.table(HEAD, [row.cells() for row in rows], numbers=[1, 2, 3, 4]),
        )
        for title, rows in comparison.sections.items()
    ]
    before, after = map(fits_its_chip, comparison.reports) if reports else (None, None)
    return together(
        page.headline(f"before: {comparison.before}", before),
        page.headline(f"after: {comparison.after}", after),
        charts(reports, colours_of_reports(comparison.reports), comparison.budget),
        *tables,
        *(tag("p", note) for note in comparison.notes),
    )
