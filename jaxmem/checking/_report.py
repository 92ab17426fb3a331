"""What `check` returns: each result with its difference and its tolerance."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from jaxmem.pages import SavedResult, rich_table

_SHOWN = 8  # results that `print` shows of those that differ


@dataclass(frozen=True)
class LeafDifference:
    """One array of a step's results.

    It is taken at the first step after which it is off by more than its tolerance, or
    else at the one where it is off the most.

    Attributes:
      name: where it is in the results, or in an object that the step updates.
      array: its dtype and shape.
      step: the call after which it is, from 1.
      largest: the largest difference of two elements.
      tolerance: of the largest difference.
      ratio: the largest share that a measure has of its tolerance; up to 1 passes. The
        measures are the largest difference, the root mean square, and the projection on
        the reference's result.
      apart: elements that are NaN or infinite in one of the two alone.
      nans: elements that are NaN in both.
      rounding: how many times as far rounding moves the step's result as the
        reference's; None where that was not measured, as no result differs by more than
        what rounding does to the reference.
    """

    name: str
    array: str
    step: int
    largest: float
    tolerance: float
    ratio: float
    apart: int = 0
    nans: int = 0
    rounding: float | None = None


@dataclass(frozen=True)
class CheckReport(SavedResult):
    """What `jaxmem.check` returns; prints as lines, and is true where all agree.

    Attributes:
      name: the step's name.
      reference: the reference's.
      device: that both ran on.
      steps: how many calls, one after the other.
      carried: what of the results the next call was given, in words.
      leaves: each result, in order.
      module: the first module whose value differs; empty where none is known.
      where: the line of it, as `file:line (function)`; empty where unknown.
      guilty: the passes of `jaxmem.schedule` without which there is no difference.
      notes: what else is to be said, in sentences.
    """

    name: str
    reference: str
    device: str
    steps: int
    carried: str
    leaves: tuple[LeafDifference, ...]
    module: str = ""
    where: str = ""
    guilty: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    # writes the script; arrays and functions, which are no part of the result
    _script: Any = field(default=None, repr=False, compare=False)

    @property
    def passed(self) -> bool:
        """Whether every result is within its tolerance."""
        return all(leaf.ratio <= 1 for leaf in self.leaves)

    @property
    def different(self) -> tuple[LeafDifference, ...]:
        """The results that are not within their tolerance, in order."""
        return tuple(leaf for leaf in self.leaves if leaf.ratio > 1)

    def __bool__(self) -> bool:
        return self.passed

    def write_script(self, path: str | PathLike[str]) -> None:
        """Writes a Python file that runs the same check again.

        Args:
          path: of the file. Arrays lie beside it, in a file of the same name that ends
            in .npz; where they are large, others of their shapes are drawn instead.
        """
        self._script(path)

    def to_json(self, indent: int | None = None) -> str:
        """All fields as JSON text, and whether it passed."""
        names = [f.name for f in dataclasses.fields(self) if f.name != "_script"]
        data = {name: getattr(self, name) for name in names}
        data["leaves"] = [_plain(leaf) for leaf in self.leaves]
        return json.dumps({**data, "passed": self.passed}, indent=indent)

    def __str__(self) -> str:
        lines = [self._headline()]
        for leaf in (self.different or self._worst())[:_SHOWN]:
            lines.append(f"    {_line(leaf)}")
        if len(self.different) > _SHOWN:
            lines.append(f"    and {len(self.different) - _SHOWN} more")
        return "\n".join([*lines, *self._sentences()])

    def __rich__(self) -> Any:
        rows = map(_row, self.leaves)
        return rich_table(_HEAD, rows, self._headline(), self._sentences())

    def _on_page(self, page: Any) -> tuple[Any, ...]:
        return (
            *(self._headline(), self.passed),
            page.table(_HEAD, map(_row, self.leaves), numbers=[2, 3, 4, 5]),
            page.lines("Notes", self._sentences()),
        )

    def _headline(self) -> str:
        steps = f"{self.steps} step{'s' if self.steps > 1 else ''}"
        results = f"{len(self.leaves)} result{'s' if len(self.leaves) > 1 else ''}"
        count = f"{results}, {steps}"
        if self.passed:
            return f"{self.name} agrees with {self.reference} on {self.device}: {count}"
        found = f"{len(self.different)} of {count}"
        return f"{self.name} differs from {self.reference} on {self.device}: {found}"

    def _worst(self) -> tuple[LeafDifference, ...]:
        return tuple(sorted(self.leaves, key=lambda leaf: -leaf.ratio)[:1])

    def _sentences(self) -> list[str]:
        said = [self.carried] if self.carried else []
        if self.module:
            where = f", {self.where}" if self.where else ""
            said.append(f"the first module that differs: {self.module}{where}")
        if self.guilty:
            said.append(f"the pass that causes it: {' with '.join(self.guilty)}")
        return [*said, *self.notes]


_HEAD = ("result", "array", "step", "largest difference", "tolerance", "ratio")


def _row(leaf: LeafDifference) -> tuple[str, ...]:
    numbers = (leaf.largest, leaf.tolerance, leaf.ratio)
    return leaf.name, leaf.array, str(leaf.step), *(f"{x:.2g}" for x in numbers)


def _line(leaf: LeafDifference) -> str:
    name, array, step, largest, allowed, ratio = _row(leaf)
    text = f"{name} {array}, step {step}: off by {largest}, allowed {allowed}"
    if leaf.apart:
        text += f", {leaf.apart} elements are NaN or infinite in one alone"
    return f"{text} (ratio {ratio})"


def _plain(leaf: LeafDifference) -> dict[str, Any]:
    """JSON has no infinity."""
    data = dataclasses.asdict(leaf)
    return {k: None if _is_infinite(v) else v for k, v in data.items()}


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
