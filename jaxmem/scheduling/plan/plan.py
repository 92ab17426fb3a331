"""What `schedule` did to a step, in words and bytes."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Annotated, Any

import jax

from jaxmem._checks import OneOf, from_plain
from jaxmem.chips import CHIPS
from jaxmem.cost.host_traffic import host_traffic
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.shards import InputSpreads
from jaxmem.memory import MemoryReport, format_bytes
from jaxmem.memory.report import plot_both
from jaxmem.memory.report.donation import device_bytes
from jaxmem.pages import SavedResult, body_of
from jaxmem.scheduling._choice import NO_CHOICE, Choice, Count
from jaxmem.scheduling._passes import CONFIGS
from jaxmem.scheduling._rewritten import Rewritten
from jaxmem.scheduling.plan import text
from jaxmem.scheduling.plan.rows import (
    Gradient,
    RecomputedOperation,
    RecomputedResidual,
    TiledRegion,
)
from jaxmem.scheduling.predict.prediction import predicted_peak
from jaxmem.scheduling.search.compiles import Compared
from jaxmem.scheduling.search.result import SearchResult, Trial

_SHOWN = 30
_ON_A_PAGE = 1000
_BELOW = 6  # tiled regions named below the picture
Axes = tuple[tuple[str, int], ...]  # of a mesh: names and sizes
# properties that the JSON has as well
_DERIVED = ("lower_bound", "budget_met")


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
      fingerprint: tells the step that the plan was made for from others.
      offloaded_bytes: of residuals that wait in the host's memory.
      host_traffic_bytes: that a device moves to the host's memory and back in a step,
        of residuals and of optimizer state (`jaxmem.optim.on_host`).
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
    def lower_bound(self) -> int:
        """Bytes of arguments and results, as compiled, which no plan can go below.

        0 where nothing was compiled: what XLA makes of the rest its graph does not say.
        """
        report = self.scheduled
        return 0 if report is None else report.peak_bytes - report.temp_bytes

    @property
    def budget_met(self) -> bool | None:
        """Whether the compiled peak is within the budget; None where either is not."""
        if self.budget is None or self.scheduled is None:
            return None
        return self.scheduled.peak_bytes <= self.budget

    @property
    def host_seconds(self) -> float:
        """Seconds that the link to the host is busy, by the rate of the target."""
        return self.host_traffic_bytes / CHIPS[self._chip].machine.host

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
        fields |= {name: getattr(self, name) for name in _DERIVED}
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
            if isinstance(plain, dict):
                plain = {k: v for k, v in plain.items() if k not in _DERIVED}
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
        largest = text.pictured(self.tiles[:_BELOW])
        plot_both(self.plain, self.scheduled, path, largest)

    def __str__(self) -> str:
        rows = [*text.rows(self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
            for row in rows[:_SHOWN]
        )
        return "\n".join([*self._head(), *lines, *self._below(len(rows), _SHOWN)])

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table(*text.HEAD, title="\n".join(self._head()))
        rows = [*text.rows(self)]
        for row in rows[:_SHOWN]:
            table.add_row(*(cell.replace("[", r"\[") for cell in row))
        table.caption = "\n".join(self._below(len(rows), _SHOWN)) or None
        return table

    def _html(self) -> tuple[str, Any]:
        from jaxmem.pages import page
        from jaxmem.pages.markup import together

        rows = [*text.rows(self)]
        if self.plain is None or self.scheduled is None:
            both = ""
        else:
            both = body_of(self.plain.compare(self.scheduled))
        headline = text.headline(self)
        return headline, together(
            page.headline(headline, self.budget_met),
            page.lines("What was done", text.done(self)),
            both,
            page.table(text.HEAD, rows[:_ON_A_PAGE], numbers=[1]),
            page.lines("In short", self._below(len(rows), _ON_A_PAGE)),
        )

    def _head(self) -> list[str]:
        return [text.headline(self), *text.done(self)]

    def _below(self, count: int, shown: int) -> list[str]:
        left = [f"... {count - shown} smaller ones"] if count > shown else []
        return [*left, *text.remarks(self)]


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
        predicted_peak(rewritten.jaxpr, *about),
        result.fingerprint,
        description.offloaded_bytes,
        sum(primitives.is_barrier(e) for e in jaxprs.walk(rewritten.jaxpr)),
        tuple(notes),
        jax.__version__,
        target,
        host_traffic(rewritten.jaxpr, spreads),
        tuple(sorted(description.tiles, **by_size)),
        mesh,
    )


def _choice(plain: Any, name: str) -> Choice:
    return Choice.from_dict(plain, CONFIGS, name)


def undonated(arguments) -> str:
    """What it costs that no argument is donated, and what to do."""
    arrays = filter(jaxprs.is_array, jax.tree.leaves(arguments))
    size = sum(map(device_bytes, arrays))
    return (
        f"no argument is donated: of {format_bytes(size)} of arguments, what the step "
        "updates is there twice. Name the parameters and the optimizer state in "
        "donate_argnums"
    )
