"""What the backward pass still keeps after a substitution, formula by formula."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from jaxmem._checks import array_text
from jaxmem.memory import Residual, residuals
from jaxmem.nn._rules import LEAVE_SCOPE


@dataclass(frozen=True)
class RemainingArrays:
    """Arrays that the backward pass keeps and no lean op has a say in.

    Args:
        bytes: of all of them.
        array: dtype and shape of one.
        formula: the chain of operations that makes it, as `x * sigmoid(1.702 * x)`.
        source: your line that has it, as `file:line (function)`; a library's, if there
            is none.
        path: the module it is made in; of several the first.
        count: how many there are: layers, and repetitions on that line.
    """

    bytes: int
    array: str
    formula: str
    source: str
    path: str = ""
    count: int = 1


@dataclass(frozen=True)
class KeptArrays:
    """What the backward pass of a model keeps beyond its arguments.

    Args:
        lean_bytes: what the lean ops keep.
        left: the rest, the largest first.
    """

    lean_bytes: int
    left: tuple[RemainingArrays, ...]

    @property
    def total_bytes(self) -> int:
        """All that is kept."""
        return self.lean_bytes + sum(row.bytes for row in self.left)


def kept_by(fn: Callable, *args: Any) -> KeptArrays:
    """What the backward pass of `fn` keeps, its first argument differentiated."""
    found = residuals(fn, *args, argnums=0)
    values = [entry for entry in found if entry.kind != "argument"]
    lean = sum(entry.bytes for entry in values if _is_lean(entry))
    return KeptArrays(lean, _merged(e for e in values if not _is_lean(e)))


def _is_lean(entry: Residual) -> bool:
    """Whether an op of this package made it."""
    return "jaxmem." in entry.path.replace(LEAVE_SCOPE, "")


def _merged(entries: Iterable[Residual]) -> tuple[RemainingArrays, ...]:
    # What is alike but for the module is one row.
    rows: dict[tuple[str, str, str], RemainingArrays] = {}
    for e in entries:
        array = array_text(e)
        row = RemainingArrays(
            0, array, e.formula or e.operation, e.line or e.source, e.path, 0
        )
        key = row.array, row.formula, row.source
        old = rows.setdefault(key, row)
        rows[key] = replace(old, bytes=old.bytes + e.bytes, count=old.count + 1)
    return tuple(sorted(rows.values(), key=lambda row: -row.bytes))
