"""What `advise` returns: measures, what each takes, and the code of the one to take."""

from dataclasses import dataclass
from os import PathLike
from typing import Any

from jaxmem.memory import format_bytes
from jaxmem.pages import PlainResult, aligned, import_figure

EXACT = "none"  # the error of a measure that changes nothing but rounding


@dataclass(frozen=True)
class CompiledMeasure:
    """A technique that was compiled.

    Attributes:
      name: its name, or those of several together.
      code: the lines to write.
      peak_bytes: of the compiled step, on one device; None where the compiler refused
        it.
      fits: whether that is within the budget.
      recomputed_flops: of matrix products that the backward pass does a second time.
      recomputed_seconds: of all that it does a second time, by the rates of the target.
      sent_bytes: what a device sends the others in a step.
      error: what changes in training; "none" where only rounding does.
      why: what the compiler or the search said of a step that does not fit; that there
        was nothing to substitute.
      tile_seconds: that regions in tiles and micro-batches take longer, by these rates.
      host_seconds: that the link to the host is busy, by these rates.
      done: what `schedule` did, in words.
      predicted_seconds: of the compiled step; None without rates of the chip.
    """

    name: str
    code: tuple[str, ...]
    peak_bytes: int | None
    fits: bool
    recomputed_flops: float = 0.0
    recomputed_seconds: float = 0.0
    sent_bytes: int = 0
    error: str = EXACT
    why: str = ""
    tile_seconds: float = 0.0
    host_seconds: float = 0.0
    done: tuple[str, ...] = ()
    predicted_seconds: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds that a step takes longer, by the rates of the target.

        The link to the host counts in full, although it is used beside other work.
        """
        return self.recomputed_seconds + self.tile_seconds + self.host_seconds

    @property
    def exact(self) -> bool:
        """Whether training equals that of the original step, up to rounding."""
        return self.error == EXACT


@dataclass(frozen=True)
class Advice(PlainResult):
    """The techniques that `jaxmem.advise` compiled, in order; prints as a table.

    Attributes:
      name: the step's name.
      target: the chip.
      budget_bytes: what the step may take on one device.
      measures: those compiled, the original step first; without `every` the last is
        the first that fits, if any does.
    """

    name: str
    target: str
    budget_bytes: int
    measures: tuple[CompiledMeasure, ...]

    @property
    def taken(self) -> CompiledMeasure | None:
        """The recommended one of those that fit; None if none does.

        The exact ones come first, and of these the one that is predicted to take least
        time; without rates of the chip it is the first.
        """
        fit = [one for one in self.measures if one.fits]
        among = [one for one in fit if one.exact] or fit
        if any(one.predicted_seconds is None for one in among):
            return among[0] if among else None
        return min(among, key=lambda one: one.predicted_seconds or 0.0, default=None)

    @property
    def code(self) -> str:
        """The code to write for it; empty if no technique fits, or none is needed."""
        return "\n".join(self.taken.code) if self.taken else ""

    def __str__(self) -> str:
        rows = [_HEAD, *map(self._cells, self.measures)]
        return "\n".join([self._headline(), *aligned(rows), *self._remarks()])

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.syntax import Syntax
        from rich.table import Table

        table = Table(*_HEAD, title=self._headline())
        for column in table.columns[1:4]:
            column.justify = "right"
        for one in self.measures:
            style = "green" if one is self.taken else None
            table.add_row(*self._cells(one), style=style)
        remarks = "\n".join(self._remarks(code=False))
        parts: list[Any] = [table, remarks] if remarks else [table]
        if self.code:
            parts.append(Syntax(self.code, "python", background_color="default"))
        return Group(*parts)

    def plot(self, path: str | PathLike[str]) -> None:
        """Plots the bytes of each technique and the budget.

        Args:
          path: a file whose suffix matplotlib knows, such as `.png` or `.svg`.

        Raises:
          ImportError: matplotlib is not installed (extra `plot`).
          ValueError: no measure was compiled to the end.
        """
        known = [one for one in self.measures if one.peak_bytes is not None]
        if not known:
            raise ValueError("nothing to draw: the compiler refused every technique")
        size = 8, 1.2 + 0.4 * len(known)
        figure = import_figure()(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        sizes = [(one.peak_bytes or 0) / 2**30 for one in known]
        colours = ["tab:green" if one.fits else "tab:gray" for one in known]
        about = ["" if one.exact else " (approximate)" for one in known]
        names = [one.name + words for one, words in zip(known, about, strict=True)]
        bars = axes.barh(names, sizes, color=colours)
        axes.bar_label(bars, [f"{size:.2f}" for size in sizes], padding=3)
        axes.axvline(self.budget_bytes / 2**30, color="tab:red", label="budget")
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel(f"GiB of one device at the peak, compiled for {self.target}")
        axes.legend()
        figure.savefig(path)

    def _on_page(self, page: Any) -> tuple[Any, ...]:
        return (
            *(self._headline(), self.taken is not None),
            page.table(_HEAD, map(self._cells, self.measures), numbers=[1, 2, 3]),
            page.lines("What was found", self._remarks(code=False)),
            page.code("What to write", self.code),
        )

    def _headline(self) -> str:
        room = f"{format_bytes(self.budget_bytes)} on {self.target}"
        if self.taken is None:
            return f"{self.name}: no technique that was tried fits {room}"
        if self.taken is self.measures[0]:
            return f"{self.name} fits {room} as it is"
        return f"{self.name} fits {room} with {self.taken.name}"

    def _cells(self, one: CompiledMeasure) -> tuple[str, ...]:
        peak = "refused" if one.peak_bytes is None else format_bytes(one.peak_bytes)
        seconds, more = one.predicted_seconds, one.seconds
        return (
            one.name,
            peak,
            f"{1e3 * seconds:.4g}" if seconds else "",
            f"{1e3 * more:.3g}" if more else "",
            "yes" if one.fits else "no",
            one.error,
        )

    def _remarks(self, code: bool = True) -> list[str]:
        whys = [f"{r.name}: {r.why}" for r in self.measures if r.why]
        done = [f"{r.name}: {', '.join(r.done)}" for r in self.measures if r.done]
        return [*whys, *done, *(["", self.code] if code and self.code else [])]


_HEAD = ("technique", "peak", "predicted ms", "of it recomputing", "fits", "error")
