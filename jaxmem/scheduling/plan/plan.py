"""What `schedule` did to a step, in words and bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import jax

from jaxmem.cost.host_traffic import host_traffic
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.shards import InputShardings
from jaxmem.memory import format_bytes
from jaxmem.memory.report.donation import device_bytes
from jaxmem.scheduling._rewritten import Rewritten
from jaxmem.scheduling.plan.data import Axes, PlanData
from jaxmem.scheduling.plan.json_text import as_json, plan_of
from jaxmem.scheduling.plan.table import as_rich, as_text
from jaxmem.scheduling.plan.text import headline
from jaxmem.scheduling.predict.prediction import predicted_peak
from jaxmem.scheduling.search.compiles import Compared
from jaxmem.scheduling.search.result import SearchResult


@dataclass(frozen=True)
class Plan(PlanData):
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
      plain: the compiled bytes of the original step, where a target was named.
      scheduled: the same of the step as it is scheduled.
      target: the chip that both were compiled for, "" where for none; a report that is
        None then means that the compiler found no way to fit the chip.
      predicted_bytes: the peak as the graph of the scheduled step has it, in the order
        that XLA is expected to take.
      fingerprint: tells the step that the plan was made for from others.
      offloaded_bytes: of residuals that are offloaded to the host.
      host_traffic_bytes: that a device moves to the host's memory and back in a step,
        of residuals and of optimizer state (`jaxmem.optim.on_host`).
      tiles: regions that are run in parts, those that save most first.
      barriers: in the scheduled step, its own included; one in a loop counts once.
      notes: what it costs that nothing is donated, and the like.
      jax_version: of the jax that traced the step: another may trace it otherwise.
      mesh: (name, size) of the axes of the mesh that the arguments are sharded over;
        empty on one device.
    """

    def to_json(self, indent: int | None = None) -> str:
        """The plan as JSON text; `from_json` reads it back.

        The advice of its reports is left out, unless it has been read: it takes about
        as long as a search.
        """
        return as_json(self, indent)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that `to_json` wrote; `jaxmem.schedule(step, plan=...)` takes it.

        Args:
          text: what `to_json` returned.

        Returns:
          An equal plan.

        Raises:
          ValueError: the text is not a plan, or not one that this version can read;
            the error names the version of jaxmem that wrote it.
        """
        return plan_of(cls, text)

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
        from jaxmem.scheduling.plan.views import plot_plan

        plot_plan(self, path)

    def __str__(self) -> str:
        return as_text(self)

    def __rich__(self) -> Any:
        return as_rich(self)

    def _html(self) -> tuple[str, Any]:
        from jaxmem.scheduling.plan.views import as_html

        return headline(self), as_html(self)


def make_plan(
    rewritten: Rewritten,
    result: SearchResult,
    both: Compared,
    target: str,
    aliases: Mapping[int, int],
    notes: Sequence[str],
    shardings: InputShardings | None = None,
    mesh: Axes = (),
) -> Plan:
    """The plan of a rewritten step, both versions compiled for `target`."""
    choice, description = result.choice, rewritten.description
    about = aliases, choice.target, shardings
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
        host_traffic(rewritten.jaxpr, shardings),
        tuple(sorted(description.tiles, **by_size)),
        mesh,
    )


def undonated(arguments) -> str:
    """What it costs that no argument is donated, and what to do."""
    arrays = filter(jaxprs.is_array, jax.tree.leaves(arguments))
    size = sum(map(device_bytes, arrays))
    return (
        f"no argument is donated: of {format_bytes(size)} of arguments, what the step "
        "updates is in memory twice. Name the parameters and the optimizer state in "
        "donate_argnums"
    )
