"""What `schedule` did to a step, in words and bytes."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Annotated, Any

import jax

from jaxmem._checks import OneOf, from_plain
from jaxmem.chips import CHIPS
from jaxmem.ir import jaxprs
from jaxmem.ir.costs import MACHINES, host_traffic
from jaxmem.ir.shards import InputSpreads
from jaxmem.memory import MemoryReport, format_bytes
from jaxmem.memory.report import plot_both, sent_line
from jaxmem.pages import SavedResult, body_of
from jaxmem.scheduling._choice import NO_CHOICE, Choice, Count
from jaxmem.scheduling._passes import CONFIGS, Rewritten
from jaxmem.scheduling.plan.rows import (
    Gradient,
    RecomputedOperation,
    RecomputedResidual,
    TiledRegion,
    nbytes,
)
from jaxmem.scheduling.predict.prediction import predicted_and_bound
from jaxmem.scheduling.search.compiles import Compared
from jaxmem.scheduling.search.result import SearchResult, Trial

_BARRIER = "optimization_barrier"
_SHOWN = 30
_ON_A_PAGE = 1000
_BELOW = 6  # tiled regions named below the picture
Axes = tuple[tuple[str, int], ...]  # of a mesh: names and sizes
_HEAD = ("what", "bytes", "array", "where", "why")


@dataclass(frozen=True)
class Plan(SavedResult):
    """What is done to a step; prints as a table.

    Attributes:
      gradients: the stacked outputs of backward scans, the largest first.
      residuals: what forward scans no longer keep, the largest first.
      recomputed: operations that cost something and are done a second time, the
        dearest first.
      choice: what the search for a budget has settled on.
      budget: bytes; None where none was given.
      tried: what it compiled, in order.
      planning_seconds: of the search, its compiles included.
      plain: the compiled bytes of the step as it was given, where a target was named.
      scheduled: the same of the step as it is scheduled.
      target: the chip that both were compiled for, "" where for none; a report that is
        None then means that the compiler found no way to fit the chip.
      predicted_bytes: the peak as the graph of the scheduled step has it, in the order
        that XLA is expected to take.
      lower_bound: bytes, arguments and outputs included, below which no order of the
        scheduled step's operations can have its peak, in the graph's own accounting.
      fingerprint: tells the step that the plan was made for from others.
      offloaded_bytes: of residuals that wait in the host's memory.
      host_traffic_bytes: that a step moves to the host's memory and back, of residuals
        and of optimizer state (`jaxmem.optim.on_host`).
      tiles: regions that are run in parts, those that save most first.
      barriers: in the scheduled step, its own included; one in a loop counts once.
      notes: what it costs that nothing is donated, and the like.
      jax_version: of the jax that traced the step: another may trace it otherwise.
      mesh: (name, size) of the axes of the mesh that the arguments are spread over;
        empty on one device.
    """

    gradients: tuple[Gradient, ...]
    residuals: tuple[RecomputedResidual, ...]
    recomputed: tuple[RecomputedOperation, ...] = ()
    choice: Choice = NO_CHOICE
    budget: Count | None = None
    tried: tuple[Trial, ...] = ()
    planning_seconds: float = 0.0
    plain: MemoryReport | None = None
    scheduled: MemoryReport | None = None
    predicted_bytes: int = 0
    lower_bound: int = 0
    fingerprint: str = ""
    offloaded_bytes: int = 0
    barriers: int = 0
    notes: tuple[str, ...] = ()
    jax_version: str = ""
    target: Annotated[str, OneOf(("", *CHIPS))] = ""
    host_traffic_bytes: int = 0
    tiles: tuple[TiledRegion, ...] = ()
    mesh: Axes = ()

    @property
    def host_seconds(self) -> float:
        """Seconds that the link to the host is busy, by the rate of the target."""
        return self.host_traffic_bytes / MACHINES[self._chip].host

    @property
    def _chip(self) -> str:
        """What the plan was compiled for; else what the search assumed."""
        return self.target or self.choice.target

    @property
    def released_bytes(self) -> int:
        """Bytes of stacked gradients that are never made."""
        return sum(g.bytes for g in self.gradients if g.released)

    @property
    def kept_bytes(self) -> int:
        """Bytes of stacked gradients that are still made."""
        return sum(g.bytes for g in self.gradients if not g.released)

    @property
    def residual_bytes(self) -> int:
        """Bytes of residuals that are no longer kept, less what is kept instead."""
        return sum(r.bytes for r in self.residuals)

    @property
    def recomputed_flops(self) -> float:
        """Flops of matmuls and convolutions that are recomputed."""
        return sum(r.flops for r in self.recomputed)

    @property
    def recomputed_seconds(self) -> float:
        """Seconds that recomputation takes, by the rates of the target."""
        return sum(r.seconds for r in self.recomputed)

    @property
    def tile_seconds(self) -> float:
        """Seconds that tiles take longer, by the rates of the target."""
        return sum(r.seconds for r in self.tiles)

    def to_json(self, indent: int | None = None) -> str:
        """The plan as JSON text; `from_json` reads it back."""
        fields = dataclasses.asdict(self)
        fields["choice"] = self.choice.to_dict()
        for row, trial in zip(fields["tried"], self.tried, strict=True):
            row["choice"] = trial.choice.to_dict()
        return json.dumps(fields, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that `to_json` wrote; `jaxmem.schedule(step, plan=...)` takes it.

        Args:
          text: what `to_json` returned.

        Returns:
          An equal plan.

        Raises:
          ValueError: the text is not a plan.
        """
        try:
            plain = json.loads(text)
            return from_plain(cls, plain, "plan", {Choice: _choice})
        except (TypeError, ValueError) as error:
            raise ValueError(f"text: not a plan: {error}") from error

    def table(self) -> Any:
        """The plan as a `rich` table."""
        return self.__rich__()

    def plot(self, path: str | PathLike[str]) -> None:
        """Draws the bytes over the compiled schedule, before and after.

        Args:
          path: where the picture goes, as matplotlib takes it: `"plan.png"`.

        Raises:
          ValueError: nothing was compiled: give `plan` or `schedule` a target.
          ImportError: matplotlib is missing (extra `plot`).
        """
        if self.plain is None or self.scheduled is None:
            why = "name a target, as in plan(target='h100')"
            if self.target:
                why = f"the step does not fit {self.target}, which has compiled nothing"
            raise ValueError(f"nothing to draw: {why}")
        largest = list(self.tiles[:_BELOW])
        plot_both(self.plain, self.scheduled, path, [_tile(r) for r in largest])

    def __str__(self) -> str:
        rows = [*_rows(self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
            for row in rows[:_SHOWN]
        ]
        return "\n".join([self._headline(), *lines, *self._footer(len(rows))])

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table(*_HEAD, title=self._headline())
        rows = [*_rows(self)]
        for row in rows[:_SHOWN]:
            table.add_row(*(cell.replace("[", r"\[") for cell in row))
        table.caption = "\n".join(self._footer(len(rows))) or None
        return table

    def _html(self) -> tuple[str, Any]:
        from jaxmem.pages import page
        from jaxmem.pages.markup import together

        rows = [*_rows(self)]
        if self.plain is None or self.scheduled is None:
            both = ""
        else:
            both = body_of(self.plain.compare(self.scheduled))
        headline, left = self._headline(), len(rows) - _ON_A_PAGE
        return headline, together(
            page.headline(headline),
            page.lines("In short", self._footer(_SHOWN)),
            both,
            page.table(_HEAD, rows[:_ON_A_PAGE], numbers=[1]),
            f"... {left} smaller ones" if left > 0 else "",
        )

    def _headline(self) -> str:
        return (
            f"{format_bytes(self.released_bytes)} of stacked gradients released, "
            f"{format_bytes(self.kept_bytes)} kept; "
            f"{format_bytes(self.residual_bytes)} of residuals recomputed"
        )

    def _footer(self, count: int) -> Iterator[str]:
        if count > _SHOWN:
            yield f"... {count - _SHOWN} smaller ones"
        if self.target:
            before, after = map(_peak, (self.plain, self.scheduled))
            yield f"compiled for {self.target}: {before} as it was, {after} scheduled"
        if self.plain and self.scheduled and self.scheduled.sent_bytes:
            yield from _sent(self.plain, self.scheduled)
        if self.predicted_bytes:
            yield (
                f"predicted peak {format_bytes(self.predicted_bytes)}; no order of its "
                f"operations is below {format_bytes(self.lower_bound)}"
            )
        if self.recomputed:
            yield (
                f"recomputed: {self.recomputed_flops:.3g} flops of matmuls, some "
                f"{1e3 * self.recomputed_seconds:.3g} ms on {self.choice.target}"
            )
        if self.tiles:
            yield (
                f"{len(self.tiles)} regions in tiles, some "
                f"{1e3 * self.tile_seconds:.3g} ms on {self.choice.target}"
            )
        if self.offloaded_bytes:
            size = format_bytes(self.offloaded_bytes)
            yield f"{size} of residuals wait in the host's memory"
        if self.host_traffic_bytes:
            yield (
                f"{format_bytes(self.host_traffic_bytes)} go to the host's memory and "
                f"back: the link of {self._chip} is busy for some "
                f"{1e3 * self.host_seconds:.3g} ms a step"
            )
        if self.barriers:
            yield f"{self.barriers} barriers"
        if self.budget is not None:
            yield (
                f"budget {format_bytes(self.budget)}: {len(self.tried)} compiles in "
                f"{self.planning_seconds:.0f} s"
            )
        yield from self.notes


_SCALARS = 1e-3  # of what is sent: sums of scalars that XLA combines otherwise


def _sent(plain: MemoryReport, scheduled: MemoryReport) -> Iterator[str]:
    """What a device sends in a step, and whether that is more than it was."""
    before, after = plain.sent_bytes, scheduled.sent_bytes
    yield f"{sent_line(scheduled)}; {format_bytes(before)} as it was given"
    if after > (1 + _SCALARS) * before:
        yield (
            f"that is {format_bytes(after - before)} more than the step as it was "
            "given: what is recomputed along an axis that is spread over devices is "
            "sent once more"
        )


def _rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    for report, which in (
        (plan.plain, "the step as it was given"),
        (plan.scheduled, "the scheduled step"),
    ):
        if plan.target and not _fits(report):
            size = "" if report is None else format_bytes(report.peak_bytes)
            yield "does not fit", size, "", "", f"{which}, on {plan.target}"
    for g in plan.gradients:
        what = "released" if g.released else "kept"
        yield what, format_bytes(g.bytes), _array(g), g.path, g.why
    for r in plan.residuals:
        what = "recomputed" if r.bytes > 0 else "kept instead"
        yield what, format_bytes(abs(r.bytes)), _array(r), r.path, r.how
    for r in plan.recomputed:
        cost = f"{r.times} times, {1e3 * r.seconds:.3g} ms in all"
        yield f"recomputed {r.operation}", "", _array(r), r.path, cost
    for r in plan.tiles:
        where = ", ".join(filter(None, (r.path, r.line)))
        yield "in tiles", format_bytes(r.bytes), _array(r), where, _in_tiles(r)


def _in_tiles(r: TiledRegion) -> str:
    before, after = map(format_bytes, (r.bytes_before, r.bytes_after))
    over = f"axis {r.axis}" if r.axis.isdigit() else r.axis
    often = f"{r.times} times, " if r.times > 1 else ""
    cost = f"{often}{1e3 * r.seconds:.3g} ms in all"
    return f"{r.n} over {over}: {before} -> {after} at one time; {cost}"


def _tile(r: TiledRegion) -> str:
    """A line below the picture."""
    return f"in tiles: {_array(r)} of {r.path or r.line}, {_in_tiles(r)}"


def _fits(report: MemoryReport | None) -> bool:
    """Whether the chip has the memory; None stands for a step that it refused."""
    return report is not None and (report.memory_bytes is None or report.fits())


def _peak(report: MemoryReport | None) -> str:
    if report is None:
        return "does not fit"
    fits = report.memory_bytes is None or report.fits()
    return f"peak {format_bytes(report.peak_bytes)}" + (
        "" if fits else ", does not fit,"
    )


def _array(
    entry: Gradient | RecomputedResidual | RecomputedOperation | TiledRegion,
) -> str:
    return f"{entry.dtype}[{','.join(map(str, entry.shape))}]"


def make_plan(
    rewritten: Rewritten,
    result: SearchResult,
    both: Compared,
    target: str,
    aliases: Mapping[int, int],
    notes: Sequence[str],
    spreads: InputSpreads | None = None,
    mesh: Axes = (),
) -> Plan:
    """The plan of a rewritten step, both versions compiled for `target`."""
    choice, description = result.choice, rewritten.description
    about = aliases, choice.target, spreads
    expected, bound = predicted_and_bound(rewritten.jaxpr, *about)
    by_size = {"key": lambda x: x.bytes, "reverse": True}
    return Plan(
        tuple(sorted(description.gradients, **by_size)),
        tuple(sorted(description.residuals, **by_size)),
        tuple(sorted(description.recomputed, key=lambda r: -r.seconds)),
        choice,
        result.budget,
        tuple(t.without_report() for t in result.tried),
        result.seconds,
        both.plain,
        both.scheduled,
        expected,
        bound,
        result.fingerprint,
        description.offloaded_bytes,
        sum(e.primitive.name == _BARRIER for e in jaxprs.walk(rewritten.jaxpr)),
        tuple(notes),
        jax.__version__,
        target,
        host_traffic(rewritten.jaxpr),
        tuple(sorted(description.tiles, **by_size)),
        mesh,
    )


def _choice(plain: Any, name: str) -> Choice:
    return Choice.from_dict(plain, CONFIGS, name)


def undonated(arguments) -> str:
    """What it costs that no argument is donated, and what to do."""
    arrays = filter(jaxprs.is_array, jax.tree.leaves(arguments))
    size = sum(map(nbytes, arrays))
    return (
        f"no argument is donated: of {format_bytes(size)} of arguments, what the step "
        "updates is there twice. Name the parameters and the optimizer state in "
        "donate_argnums"
    )
