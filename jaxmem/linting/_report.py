"""What `lint` returns: findings, the most bytes first."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxmem._module_path import merge_numbered
from jaxmem.memory import format_bytes
from jaxmem.pages import PlainResult

Severity = Literal["error", "warning", "note"]
_ORDER = ("error", "warning", "note")
_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


@dataclass(frozen=True)
class Finding:
    """Something that costs a step memory or time.

    Attributes:
      check: the rule that found it, as in the table of the documentation.
      severity: "error" for what fails or does not do what it says, "warning" for what
        costs bytes or time, "note" for what may be intended.
      what: one sentence.
      where: file, line and function; the name of an argument.
      path: the modules or name scopes that contain it.
      bytes: its cost, as traced; 0 where the cost is time, or is not known.
      remedy: what to do.
      count: how many equal findings it stands for (layers, arguments).
    """

    check: str
    severity: Severity
    what: str
    where: str
    remedy: str
    path: str = ""
    bytes: int = 0
    count: int = 1


@dataclass(frozen=True)
class LintReport(PlainResult):
    """What `jaxmem.lint` returns; prints as a table.

    Attributes:
      name: the step's name.
      findings: errors first, then warnings, then notes; of each the most bytes first.
      skipped: what was not checked, and why.
    """

    name: str
    findings: tuple[Finding, ...]
    skipped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.findings)

    def __iter__(self):
        return iter(self.findings)

    def of(self, check: str) -> tuple[Finding, ...]:
        """The findings of one check."""
        return tuple(f for f in self.findings if f.check == check)

    def __str__(self) -> str:
        lines = [self._headline()]
        for f in self.findings:
            lines.append(f"{f.severity}: {f.what}{_times(f)} [{f.check}]")
            details = (_place(f), _cost(f), f.remedy)
            lines += [f"    {text}" for text in details if text]
        return "\n".join([*lines, *self.skipped])

    def __rich__(self) -> Any:
        from rich.markup import escape
        from rich.table import Table

        table = Table("bytes", "what", "where", "what to do", title=self._headline())
        table.columns[0].justify = "right"
        for f in self.findings:
            what = (
                f"[{_STYLES[f.severity]}]{f.severity}[/]: {escape(f.what + _times(f))}"
            )
            table.add_row(_cost(f), what, escape(_place(f)), escape(f.remedy))
        table.caption = "\n".join(self.skipped) or None
        return table

    def _on_page(self, page: Any) -> tuple[Any, ...]:
        rows = [
            (_cost(f), f.severity, f.what + _times(f), _place(f), f.remedy)
            for f in self.findings
        ]
        head = ("bytes", "severity", "what", "where", "what to do")
        clean = not any(f.severity == "error" for f in self.findings)
        return (
            *(self._headline(), clean),
            page.table(head, rows, numbers=[0]) if rows else "",
            page.lines("Not checked", self.skipped),
        )

    def _headline(self) -> str:
        counts = [sum(f.severity == s for f in self.findings) for s in _ORDER]
        found = [
            f"{n} {s}{'s' if n > 1 else ''}"
            for n, s in zip(counts, _ORDER, strict=True)
            if n
        ]
        return f"{self.name}: {', '.join(found) or 'nothing found'}"


def _times(finding: Finding) -> str:
    return f" ({finding.count} times)" if finding.count > 1 else ""


def _place(finding: Finding) -> str:
    return ", in ".join(part for part in (finding.where, finding.path) if part)


def _cost(finding: Finding) -> str:
    return format_bytes(finding.bytes) if finding.bytes else ""


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings in the order of a report; equal ones of numbered layers are merged."""
    findings = list(findings)
    paths = merge_numbered(f.path for f in findings)
    groups: dict[Finding, list[Finding]] = {}
    for f in findings:
        key = replace(f, path=paths[f.path], bytes=0, count=1)
        groups.setdefault(key, []).append(f)
    sums = [
        replace(key, bytes=sum(f.bytes for f in fs), count=sum(f.count for f in fs))
        for key, fs in groups.items()
    ]
    rank = lambda f: (_ORDER.index(f.severity), -f.bytes, f.check, f.where)
    return tuple(sorted(sums, key=rank))
