"""What `schedule` did to a step, in words and bytes."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxmem import _compat
from jaxmem.memory import MemoryReport, format_bytes

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
class Plan:
    """What is done to a step; prints as a table.

    Attributes:
      gradients: the stacked outputs of backward scans, the largest first.
      residuals: what is no more kept of forward scans, the largest first.
      plain: the compiled bytes of the step as it was given, where a target was named.
      scheduled: the same of the step as it is scheduled.
      notes: what it costs that nothing is donated, and the like.
    """

    gradients: tuple[Gradient, ...]
    residuals: tuple[Remade, ...]
    plain: MemoryReport | None = None
    scheduled: MemoryReport | None = None
    notes: tuple[str, ...] = ()

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

    def to_json(self) -> str:
        """All fields as JSON; bytes are integers."""
        return json.dumps(dataclasses.asdict(self), default=str)

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
        if self.plain is not None and self.scheduled is not None:
            before, after = self.plain.peak_bytes, self.scheduled.peak_bytes
            yield (
                f"compiled for {self.plain.target}: peak {format_bytes(before)} as it "
                f"was, {format_bytes(after)} scheduled"
            )
        yield from self.notes


def _rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    for g in plan.gradients:
        what = "released" if g.released else "kept"
        yield what, format_bytes(g.bytes), _array(g), g.path, g.why
    for r in plan.residuals:
        what = "made again" if r.bytes > 0 else "kept instead"
        yield what, format_bytes(abs(r.bytes)), _array(r), r.path, r.how


def _array(entry: Gradient | Remade) -> str:
    return f"{entry.dtype}[{','.join(map(str, entry.shape))}]"


def make_plan(found, reports: Sequence[MemoryReport], undonated: Any) -> Plan:
    """The plan of a rewritten step; `undonated`: its arguments if none is donated."""
    gradients = [
        Gradient(*_described(s.var.aval, s.maker), s.released, s.why)
        for s in found.stacks
    ]
    residuals = [_remade(*entry) for entry in found.residuals]
    notes = [] if undonated is None else [_undonated(undonated)]
    plain, scheduled = reports or (None, None)
    by_size = {"key": lambda x: x.bytes, "reverse": True}
    return Plan(
        tuple(sorted(gradients, **by_size)),
        tuple(sorted(residuals, **by_size)),
        plain,
        scheduled,
        tuple(notes),
    )


def _remade(aval, maker, how: str, sign: int) -> Remade:
    size, shape, dtype, path = _described(aval, maker)
    return Remade(sign * size, shape, dtype, path, how)


def _undonated(arguments) -> str:
    arrays = [x for x in jax.tree.leaves(arguments) if hasattr(x, "dtype")]
    size = sum(x.size * getattr(x.dtype, "itemsize", 0) for x in arrays)
    return (
        f"no argument is donated: of {format_bytes(size)} of arguments, what the step "
        "updates is there twice. Name the parameters and the optimizer state in "
        "donate_argnums"
    )


def _described(aval, maker) -> tuple[int, tuple[int, ...], str, str]:
    path = _compat.name_stack(maker) if maker is not None else ""
    return aval.size * aval.dtype.itemsize, aval.shape, str(aval.dtype), path
