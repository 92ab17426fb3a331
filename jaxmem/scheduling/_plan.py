"""What `schedule` did to a step, in words and bytes."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import jax

from jaxmem import _compat, _jaxpr
from jaxmem.memory import MemoryReport, format_bytes
from jaxmem.memory.report import plot_both
from jaxmem.scheduling._budget import Compiled
from jaxmem.scheduling._choice import NO_CHOICE, Choice
from jaxmem.scheduling._compared import Compared
from jaxmem.scheduling._expected import predicted_and_bound
from jaxmem.scheduling._machine import MACHINES, Machine, flops, seconds

_BARRIER = "optimization_barrier"
_SHOWN = 30


@dataclass(frozen=True)
class Gradient:
    """A stacked output of a backward scan.

    Attributes:
      bytes: of the whole stack.
      shape: its shape, the layers in front.
      dtype: its dtype.
      path: the name scopes (the modules) of the operation that makes it.
      released: whether it is no more.
      why: empty where it is released; else what prevents it.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    path: str
    released: bool
    why: str = ""


@dataclass(frozen=True)
class Remade:
    """A residual of a forward scan that the backward scan makes itself.

    Attributes:
      bytes: of the whole stack; negative for what is kept in the place of others.
      shape: its shape, the layers in front.
      dtype: its dtype.
      path: the name scopes (the modules) of the operation that makes it.
      how: what it is made of.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    path: str
    how: str


@dataclass(frozen=True)
class Again:
    """An operation of the forward pass that the backward pass does again.

    Attributes:
      operation: its name.
      shape: of what it makes.
      dtype: of what it makes.
      path: the name scopes (the modules) it belongs to.
      times: how often: the number of layers.
      flops: of all times together, of matmuls and convolutions.
      seconds: of all times together, by the rates of the machine.
    """

    operation: str
    shape: tuple[int, ...]
    dtype: str
    path: str
    times: int
    flops: float
    seconds: float


@dataclass(frozen=True)
class Plan:
    """What is done to a step; prints as a table.

    Attributes:
      gradients: the stacked outputs of backward scans, the largest first.
      residuals: what is no more kept of forward scans, the largest first.
      again: operations that cost something and are done again, the dearest first.
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
      barriers: in the scheduled step, its own included; one in a loop counts once.
      notes: what it costs that nothing is donated, and the like.
      jax_version: of the jax that traced the step: another may trace it otherwise.
    """

    gradients: tuple[Gradient, ...]
    residuals: tuple[Remade, ...]
    again: tuple[Again, ...] = ()
    choice: Choice = NO_CHOICE
    budget: int | None = None
    tried: tuple[Compiled, ...] = ()
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
    target: str = ""

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
        """Bytes of stacked residuals that are no more kept, less what is instead."""
        return sum(r.bytes for r in self.residuals)

    @property
    def again_flops(self) -> float:
        """Flops of matmuls and convolutions that are done again."""
        return sum(a.flops for a in self.again)

    @property
    def again_seconds(self) -> float:
        """Seconds of doing operations again, by the rates of the machine."""
        return sum(a.seconds for a in self.again)

    def to_json(self, indent: int | None = None) -> str:
        """The plan as JSON text; `from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self), indent=indent)

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
            return _from_plain(json.loads(text))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"text: not a plan: {error!r}") from error

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
        plot_both(self.plain, self.scheduled, path)

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

        table = Table("what", "bytes", "array", "where", "why", title=self._headline())
        rows = [*_rows(self)]
        for row in rows[:_SHOWN]:
            table.add_row(*(cell.replace("[", r"\[") for cell in row))
        table.caption = "\n".join(self._footer(len(rows))) or None
        return table

    def _headline(self) -> str:
        return (
            f"{format_bytes(self.released_bytes)} of stacked gradients released, "
            f"{format_bytes(self.kept_bytes)} kept; "
            f"{format_bytes(self.residual_bytes)} of residuals made again"
        )

    def _footer(self, count: int) -> Iterator[str]:
        if count > _SHOWN:
            yield f"... {count - _SHOWN} smaller ones"
        if self.target:
            before, after = map(_peak, (self.plain, self.scheduled))
            yield f"compiled for {self.target}: {before} as it was, {after} scheduled"
        if self.predicted_bytes:
            yield (
                f"predicted peak {format_bytes(self.predicted_bytes)}; no order of its "
                f"operations is below {format_bytes(self.lower_bound)}"
            )
        if self.again:
            yield (
                f"done again: {self.again_flops:.3g} flops of matmuls, some "
                f"{1e3 * self.again_seconds:.3g} ms on {self.choice.machine}"
            )
        if self.offloaded_bytes:
            size = format_bytes(self.offloaded_bytes)
            yield f"{size} of residuals wait in the host's memory"
        if self.barriers:
            yield f"{self.barriers} barriers"
        if self.budget is not None:
            yield (
                f"budget {format_bytes(self.budget)}: {len(self.tried)} compiles in "
                f"{self.planning_seconds:.0f} s"
            )
        yield from self.notes


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
        what = "made again" if r.bytes > 0 else "kept instead"
        yield what, format_bytes(abs(r.bytes)), _array(r), r.path, r.how
    for a in plan.again:
        cost = f"{a.times} times, {1e3 * a.seconds:.3g} ms in all"
        yield f"{a.operation} again", "", _array(a), a.path, cost


def _fits(report: MemoryReport | None) -> bool:
    """Whether the chip has the memory; None stands for a step that it refused."""
    return report is not None and (report.memory_bytes is None or report.fits())


def _peak(report: MemoryReport | None) -> str:
    """The peak; None stands for a step that the compiler refused."""
    if report is None:
        return "does not fit"
    fits = report.memory_bytes is None or report.fits()
    return f"peak {format_bytes(report.peak_bytes)}" + (
        "" if fits else ", does not fit,"
    )


def _array(entry: Gradient | Remade | Again) -> str:
    return f"{entry.dtype}[{','.join(map(str, entry.shape))}]"


def make_plan(
    rewritten,
    search: Any,
    both: Compared,
    target: str,
    aliases: Mapping[int, int],
    notes: Sequence[str],
) -> Plan:
    """The plan of a rewritten step.

    `search` tells the choice, the budget, what was tried and how long it took; `both`
    are compiled for `target`.
    """
    gradients = [
        Gradient(*_described(s.var.aval, s.maker), s.released, s.why)
        for s in rewritten.stacks
    ]
    residuals = [_remade(*entry) for entry in rewritten.residuals]
    machine = MACHINES[search.choice.machine]
    expected, bound = predicted_and_bound(
        rewritten.jaxpr, aliases, search.choice.machine
    )
    again = [_again(eqn, times, machine) for eqn, times in rewritten.again]
    by_size = {"key": lambda x: x.bytes, "reverse": True}
    return Plan(
        tuple(sorted(gradients, **by_size)),
        tuple(sorted(residuals, **by_size)),
        tuple(sorted(again, key=lambda a: -a.seconds)),
        search.choice,
        search.budget,
        tuple(t.without_report() for t in search.tried),
        search.seconds,
        both.plain,
        both.scheduled,
        expected,
        bound,
        search.fingerprint,
        rewritten.offloaded,
        sum(e.primitive.name == _BARRIER for e in _jaxpr.walk(rewritten.jaxpr)),
        tuple(notes),
        jax.__version__,
        target,
    )


def _from_plain(fields: dict[str, Any]) -> Plan:
    """From what `dataclasses.asdict` makes of a plan."""

    def rows(kind, name: str) -> tuple:
        made = (kind(**row) for row in fields[name])
        return tuple(dataclasses.replace(r, shape=tuple(r.shape)) for r in made)

    def report(name: str) -> MemoryReport | None:
        plain = fields[name]
        return None if plain is None else MemoryReport.from_json(json.dumps(plain))

    tried = [dict(t, choice=_choice(t["choice"])) for t in fields["tried"]]
    return Plan(
        **fields
        | {
            "gradients": rows(Gradient, "gradients"),
            "residuals": rows(Remade, "residuals"),
            "again": rows(Again, "again"),
            "choice": _choice(fields["choice"]),
            "tried": tuple(Compiled(**t) for t in tried),
            "plain": report("plain"),
            "scheduled": report("scheduled"),
            "notes": tuple(fields["notes"]),
        }
    )


def _choice(fields: dict[str, Any]) -> Choice:
    tuples = {k: tuple(fields[k]) for k in ("segments", "sequence")}
    return dataclasses.replace(Choice(**fields), **tuples)


def _again(eqn, times: int, machine: Machine) -> Again:
    aval = eqn.outvars[0].aval
    return Again(
        eqn.primitive.name,
        aval.shape,
        str(aval.dtype),
        _compat.name_stack(eqn),
        times,
        times * flops(eqn),
        times * (seconds(eqn, machine) or 0.0),
    )


def _remade(aval, maker, how: str, sign: int) -> Remade:
    size, shape, dtype, path = _described(aval, maker)
    return Remade(sign * size, shape, dtype, path, how)


def undonated(arguments) -> str:
    """What it costs that no argument is donated, and what to do."""
    arrays = filter(_jaxpr.is_array, jax.tree.leaves(arguments))
    size = sum(map(_nbytes, arrays))
    return (
        f"no argument is donated: of {format_bytes(size)} of arguments, what the step "
        "updates is there twice. Name the parameters and the optimizer state in "
        "donate_argnums"
    )


def _described(aval, maker) -> tuple[int, tuple[int, ...], str, str]:
    path = _compat.name_stack(maker) if maker is not None else ""
    return _nbytes(aval), aval.shape, str(aval.dtype), path


def _nbytes(array) -> int:
    """A PRNG key has no size of its own."""
    return _jaxpr.elements(array.shape) * getattr(array.dtype, "itemsize", 0)
