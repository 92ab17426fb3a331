"""What `sweep` returns: a row for each step, as a table, JSON, a page and a picture."""

import json
from dataclasses import dataclass
from os import PathLike
from typing import Any

from jaxmem._bytes import format_bytes
from jaxmem.memory.sweeps.plot import plot_sweep
from jaxmem.memory.sweeps.swept_step import SweptStep
from jaxmem.memory.time.result import milliseconds
from jaxmem.pages import SavedResult, aligned


@dataclass(frozen=True)
class Sweep(SavedResult):
    """What `jaxmem.sweep` returns; prints as a table.

    Attributes:
      names: what was varied.
      steps: a row for each combination and chip, in the order of the call.
    """

    names: tuple[str, ...]
    steps: tuple[SweptStep, ...]

    def to_json(self, indent: int | None = None) -> str:
        """The rows as JSON text; bytes are integers, seconds numbers."""
        rows = [step.to_dict() for step in self.steps]
        found = {"names": self.names, "steps": rows}
        return json.dumps(found, indent=indent, default=str)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draws bytes and predicted milliseconds over the first name that varies.

        There is a line for each combination of the others, and one for each chip.

        Args:
          path: the image to write; its suffix says the format (.png, .svg, .pdf).

        Raises:
          ImportError: matplotlib is not installed (extra `plot`).
          ValueError: no step could be compiled.
        """
        plot_sweep(self.names, self.steps, path)

    def __str__(self) -> str:
        rows = [self._head(), *map(self._cells, self.steps)]
        return "\n".join(aligned(rows, numbers=range(len(rows[0]))))

    def __rich__(self) -> Any:
        from rich.markup import escape
        from rich.table import Table

        table = Table(*self._head(), box=None, header_style="bold")
        for column in table.columns:
            column.justify = "right"
        for step in self.steps:
            style = "red" if step.fits is False else None
            table.add_row(*map(escape, self._cells(step)), style=style)
        return table

    def _on_page(self, page: Any) -> tuple[Any, ...]:
        head, rows = self._head(), map(self._cells, self.steps)
        table = page.table(head, rows, range(len(head)))
        return f"sweep over {', '.join(self.names)}", None, table

    def _head(self) -> list[str]:
        chips = ["chip"] if self._chips > 1 else []
        timed = ["predicted"] if self._is_timed else []
        rates = ["examples/s"] if self._has_rates else []
        return [*self.names, *chips, "peak", *timed, *rates, ""]

    def _cells(self, step: SweptStep) -> list[str]:
        chips = [step.target] if self._chips > 1 else []
        peak = "" if step.peak_bytes is None else format_bytes(step.peak_bytes)
        took = "" if step.seconds is None else milliseconds(step.seconds)
        rate = "" if step.per_second is None else f"{step.per_second:,.4g}"
        timed = [took] if self._is_timed else []
        rates = [rate] if self._has_rates else []
        told = {None: "", True: "fits", False: "does not fit"}[step.fits]
        sizes = [str(step.sizes[name]) for name in self.names]
        return [*sizes, *chips, peak, *timed, *rates, told]

    @property
    def _chips(self) -> int:
        return len({step.target for step in self.steps})

    @property
    def _is_timed(self) -> bool:
        return any(step.seconds is not None for step in self.steps)

    @property
    def _has_rates(self) -> bool:
        return any(step.per_second is not None for step in self.steps)
