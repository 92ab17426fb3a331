"""What a substitution did: the report a user reads, and the recorder that fills it."""

import io
import os
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jaxmem.memory import format_bytes
from jaxmem.nn._remaining import KeptArrays, RemainingArrays
from jaxmem.nn._rules import Rule
from jaxmem.ops.records import RECORDS
from jaxmem.pages import SavedResult


@dataclass(frozen=True)
class Replacement:
    """One module of the model and what became of it.

    Args:
        path: the module's path, as in the parameter tree.
        module: the name of the user's class.
        replaced_by: what replaces it; None where the module was left.
        reason: why it was left, or with which option it was replaced.
    """

    path: str
    module: str
    replaced_by: str | None
    reason: str = ""


@dataclass(frozen=True)
class SubstitutionReport(SavedResult):
    """What `jaxmem.substitute` replaced, what it left and why.

    `print` it, read its fields, or `save` it as a page or as text; in a notebook it
    shows itself as tables.

    Args:
        modules: one entry a module that was replaced, or left for a reason.
        patterns: a line for each formula replaced in the traced function.
        patterns_left: a line for each formula recognised and left, with the reason.
        unused_rules: the rules, and the patterns of `save`, that matched nothing.
        traced: whether the model was traced yet; before that a linen model's
            modules and every model's formulas are unknown.
        notes: what else the user should know.
        residuals: what the backward pass keeps now; None where `report` was given no
            example arguments, or the model has nothing to differentiate.
    """

    modules: tuple[Replacement, ...]
    patterns: tuple[str, ...]
    patterns_left: tuple[str, ...]
    unused_rules: tuple[str, ...]
    traced: bool
    notes: tuple[str, ...] = ()
    residuals: KeptArrays | None = None

    @property
    def left(self) -> tuple[RemainingArrays, ...]:
        """What no lean op has a say in, the largest first."""
        return self.residuals.left if self.residuals else ()

    def replaced(self) -> int:
        """How many modules and formulas run on lean code."""
        modules = sum(entry.replaced_by is not None for entry in self.modules)
        return modules + len(self.patterns)

    def _rows(self) -> list[tuple[str, ...]]:
        """(module, class, replaced by, note) of all that is known."""
        traced = ("(traced function)", "formula")
        notes = (*self.notes, *(() if self.traced else (NOT_TRACED,)))
        return [
            *(
                (e.path or "(model)", e.module, e.replaced_by or "-", e.reason)
                for e in self.modules
            ),
            *((*traced, "lean op", line) for line in self.patterns),
            *((*traced, "-", line) for line in self.patterns_left),
            *(("", f"rule {r}", "-", "matched nothing") for r in self.unused_rules),
            *(("", "", "", note) for note in notes),
        ]

    def _kept_headline(self) -> str:
        assert self.residuals is not None
        return (
            f"{format_bytes(self.residuals.total_bytes)} kept for the backward pass, "
            f"{format_bytes(self.residuals.lean_bytes)} of it by lean ops; the rest is"
        )

    def _kept_rows(self) -> list[tuple[str, ...]]:
        """(bytes, array, formula, where) of the largest that are left."""
        return [_cells(row) for row in self.left[:_SHOWN]]

    def _smaller(self) -> str | None:
        more = self.left[_SHOWN:]
        size = format_bytes(sum(row.bytes for row in more))
        return f"... {len(more)} smaller ones, {size}" if more else None

    def _tables(self):
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table

        found = Table(title="jaxmem.substitute")
        for column in _HEAD:
            found.add_column(column, overflow="fold")
        for row in self._rows():
            found.add_row(*map(escape, row))
        if not self.residuals:
            return found
        left = Table(*_KEPT_HEAD, title=self._kept_headline(), caption=self._smaller())
        left.columns[-1].overflow = "fold"
        left.columns[0].justify = "right"
        for row in self._kept_rows():
            left.add_row(*map(escape, row))
        return Group(found, left)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=120, color_system=None).print(self._tables())
        return text.getvalue()

    def __rich__(self):
        return self._tables()

    def _on_page(self, page: Any) -> tuple[Any, ...]:
        found = "jaxmem.substitute", None, page.table(_HEAD, self._rows())
        if not self.residuals:
            return found
        return (
            *found,
            page.headline(self._kept_headline()),
            page.table(_KEPT_HEAD, self._kept_rows(), numbers=[0]),
            self._smaller() or "",
        )


def _cells(row: RemainingArrays) -> tuple[str, ...]:
    size = f"{format_bytes(row.bytes)}{_times(row)}"
    # A whole path would break over two lines wherever the project lies deep.
    line = os.path.basename(row.source)
    place = ", in ".join(part for part in (line, row.path) if part)
    return size, row.array, row.formula, place


def _times(row: RemainingArrays) -> str:
    return f" in {row.count}" if row.count > 1 else ""


_SHOWN = 20
_HEAD = ("module", "class", "replaced by", "note")
_KEPT_HEAD = ("bytes", "array", "formula", "where")
NOT_TRACED = "not traced yet: call the model, or report(model, *example_arguments)"


@dataclass
class Recorder:
    """Collects what happens while a substituted model is traced."""

    rules: tuple[Rule, ...]
    saves: tuple[str, ...] = ()
    modules: dict[str, Replacement] = field(default_factory=dict)
    patterns: tuple[str, ...] = ()
    patterns_left: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    used_saves: set[str] = field(default_factory=set)
    traced: bool = False
    residuals: KeptArrays | None = None

    def replaced(self, path: str, module: Any, by: str, reason: str = "") -> None:
        self.modules[path] = Replacement(path, type(module).__name__, by, reason)

    def left(self, path: str, module: Any, reason: str) -> None:
        self.modules[path] = Replacement(path, type(module).__name__, None, reason)

    def use(self, rule: Rule) -> None:
        self.used.add(self.rules.index(rule))

    def use_save(self, pattern: str | None) -> None:
        if pattern is not None:
            self.used_saves.add(pattern)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.mention(text)
            warnings.warn(f"jaxmem.substitute: {text}", stacklevel=5)

    def mention(self, text: str) -> None:
        """For the report alone: nothing is lost by it."""
        if text not in self.notes:
            self.notes.append(text)

    def add_patterns(self, found: Any) -> None:
        """What the rewriter reports of one trace."""
        self.patterns = _merged(self.patterns, _lines(found.replaced))
        self.patterns_left = _merged(self.patterns_left, map(str, found.left))

    def report(self) -> SubstitutionReport:
        unused = [str(r) for i, r in enumerate(self.rules) if i not in self.used]
        unused += [f"save[{p!r}]" for p in self.saves if p not in self.used_saves]
        return SubstitutionReport(
            tuple(self.modules.values()),
            self.patterns,
            self.patterns_left,
            tuple(unused),
            self.traced,
            tuple(self.notes),
            self.residuals,
        )

    def first_trace(self, verbose: bool) -> None:
        """Says once what the user would otherwise have to look up."""
        if self.traced:
            return
        self.traced = True
        report = self.report()
        for rule in report.unused_rules:
            warnings.warn(
                f"jaxmem.substitute: rule {rule} matched nothing", stacklevel=5
            )
        if not report.replaced():
            warnings.warn(f"jaxmem.substitute: {LOOKED_FOR}", stacklevel=5)
        if verbose:
            print(report)


_LAYERS = dict.fromkeys(n for r in RECORDS for n in (*r.layers.linen, *r.layers.nnx))
LOOKED_FOR = (
    f"nothing to replace in this model. Looked for Flax's {', '.join(_LAYERS)} (and "
    "subclasses that keep their __call__), for the modules named in rules, and in the "
    "traced function for the formulas in jaxmem.rewriting (gelu, softmax, attention, "
    "...)"
)


def _lines(sites: Iterable[Any]) -> list[str]:
    """A line for each formula and module; what a layer scan repeats counts once."""
    counts = Counter((site.pattern, site.path or "the model") for site in sites)
    return [f"{name} in {path}, {n} x" for (name, path), n in counts.items()]


def _merged(old: tuple[str, ...], new: Iterable[str]) -> tuple[str, ...]:
    # Without what an earlier trace has shown already.
    return tuple(dict.fromkeys((*old, *new)))
