"""What `audit` returns: findings on a compiled module."""

from dataclasses import dataclass
from typing import Any

from jaxmem.pages import PlainResult


@dataclass(frozen=True)
class AuditFinding:
    """Something that a compiled module does which the step does not say.

    Attributes:
      rule: that found it.
      what: one sentence.
      instruction: XLA's name of it.
      operation: the name scopes and the operation it was made for; empty where unknown.
      where: the line, as `file:line (function)`; empty where unknown.
      report: the public report of such a fault; empty where there is none.
      way_round: what to do, in one sentence.
    """

    rule: str
    what: str
    instruction: str
    operation: str = ""
    where: str = ""
    report: str = ""
    way_round: str = ""

    def __str__(self) -> str:
        return "\n    ".join(
            [f"{self.what} [{self.rule}]", *filter(None, _details(self))]
        )


@dataclass(frozen=True)
class AuditReport(PlainResult):
    """What `jaxmem.audit` returns; prints as lines.

    Attributes:
      name: the step's name.
      target: the chip that it was compiled for.
      findings: of all rules, in the order of the rules.
      skipped: what was not checked, and why.
    """

    name: str
    target: str
    findings: tuple[AuditFinding, ...]
    skipped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.findings)

    def __iter__(self):
        return iter(self.findings)

    def of(self, rule: str) -> tuple[AuditFinding, ...]:
        """The findings of one rule."""
        return tuple(f for f in self.findings if f.rule == rule)

    def __str__(self) -> str:
        lines = self._headline(), *map(str, self.findings), *self.skipped
        return "\n".join(lines)

    def __rich__(self) -> Any:
        from rich.markup import escape
        from rich.table import Table

        table = Table("rule", "what", "where", "what to do", title=self._headline())
        for f in self.findings:
            table.add_row(*map(escape, _row(f)))
        table.caption = "\n".join(self.skipped) or None
        return table

    def _html(self) -> tuple[str, Any]:
        from jaxmem.pages import page
        from jaxmem.pages.markup import together

        head = ("rule", "what", "where", "what to do")
        rows = [_row(f) for f in self.findings]
        headline = self._headline()
        return headline, together(
            page.headline(headline, not self.findings),
            page.table(head, rows) if rows else "",
            page.lines("Not checked", self.skipped),
        )

    def _headline(self) -> str:
        count = len(self.findings)
        found = f"{count} finding{'s' if count > 1 else ''}" if count else "no findings"
        return f"{self.name} for {self.target}: {found}"


def _details(f: AuditFinding) -> tuple[str, ...]:
    place = ", in ".join(part for part in (f.where, f.operation) if part)
    return place, f.report and f"as in {f.report}", f.way_round


def _row(f: AuditFinding) -> tuple[str, str, str, str]:
    place, report, way_round = _details(f)
    return f.rule, f.what, place, " ".join(part for part in (way_round, report) if part)
