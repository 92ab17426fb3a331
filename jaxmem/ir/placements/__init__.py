"""What one part, layer, block or device has of an array, in the words of DTensor."""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxmem.ir.types import JaxprEqn


@dataclass(frozen=True, slots=True)
class Replicate:
    """All of it, the same everywhere; of what is only asked for, anything."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A slice of it along an axis."""

    axis: int


@dataclass(frozen=True, slots=True)
class Partial:
    """A term of it: `op`, of `lax` or one of a pass's own, combines all terms."""

    op: str


Placement = Replicate | Shard | Partial
Axis = int | None  # along which axis an array is cut; None for one that is not
REPLICATE = Replicate()
SUM = Partial("add")


@functools.cache
def at(axis: Axis) -> Placement:
    return REPLICATE if axis is None else Shard(axis)


def axes_of(placements: Iterable[Placement]) -> tuple[Axis, ...]:
    """Along which axes arrays are cut; terms of a sum are whole arrays."""
    return tuple(p.axis if isinstance(p, Shard) else None for p in placements)


@dataclass(frozen=True)
class Placements:
    """How an equation works on what a part has.

    Attributes:
      ins: what it takes of each operand.
      outs: what it gives of each output.
      inner: how its bodies work on the part (`bodies.Body`), if it has any.
    """

    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]
    inner: tuple[Any, ...] = ()

    @classmethod
    def of_whole(cls, eqn: JaxprEqn) -> "Placements":
        """Of an equation that a part does as the whole does."""
        return cls((REPLICATE,) * len(eqn.invars), (REPLICATE,) * len(eqn.outvars))

    @functools.cached_property
    def in_axes(self) -> tuple[Axis, ...]:
        return axes_of(self.ins)

    @functools.cached_property
    def out_axes(self) -> tuple[Axis, ...]:
        return axes_of(self.outs)

    def operands(self, eqn: JaxprEqn) -> Iterator[tuple[Any, Axis]]:
        """(operand, along which axis it is cut) of the equation."""
        return zip(eqn.invars, self.in_axes, strict=True)

    @functools.cached_property
    def op(self) -> str:
        """What combines the outputs of all parts; empty where none is a term."""
        return next((p.op for p in self.outs if isinstance(p, Partial)), "")
