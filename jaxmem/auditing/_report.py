"""What `audit` returns: findings on a compiled module."""

from dataclasses import dataclass
from typing import Any

from jaxmem.pages import PlainResult, rich_table

_HEAD = ("rule", "what", "where", "what to do")


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
        rows = map(_row, self.findings)
        return rich_table(_HEAD, rows, self._headline(), self.skipped)

    def _on_page(self, page: Any) -> tuple[Any, ...]:
        rows = [_row(f) for f in self.findings]
        return (
            *(self._headline(), not self.findings),
            page.table(_HEAD, rows) if rows else "",
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
