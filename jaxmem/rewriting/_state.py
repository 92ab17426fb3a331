"""What a partial match has found: which value stands for which input of a formula."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from jaxmem.rewriting._fold import Number, error_of
from jaxmem.rewriting._graph import Node, Value

Positions = tuple[int | None, ...]


@dataclass(frozen=True)
class Bound:
    """What an input of the pattern stands for.

    `base` is the value below all casts and views that keep the indices; `choices`
    are the values on the way to it, each with the positions of its dimensions among
    those of the input. A `sign` of -1 means the negative of that, of a mask its
    opposite. `more` are further values, which are added to it: of masks, "and".
    """

    base: Value
    positions: Positions
    choices: tuple[tuple[Value, Positions], ...]
    sign: int = 1
    more: "tuple[Bound, ...]" = ()

    @property
    def key(self) -> tuple:
        """What tells whether two are the same array."""
        return id(self.base), self.positions, self.sign, *(b.key for b in self.more)

    def merged(self, other: "Bound") -> "Bound":
        """One for both, which are the same array."""
        common = tuple(c for c in self.choices if c in other.choices)
        wider = other if common else min(self, other, key=Bound._error)
        return replace(wider, choices=common or wider.choices)

    def _error(self) -> float:
        return min(error_of(v.dtype) for v, _ in self.choices)


@dataclass(frozen=True)
class State:
    """What a partial match has found."""

    inputs: dict[Value, Bound]
    holes: dict[Value, Number]
    covered: frozenset[Node]
    sizes: dict[str, int]

    def cover(self, nodes: Iterable[Node]) -> "State":
        return replace(self, covered=self.covered.union(nodes)) if nodes else self


@dataclass(frozen=True)
class Formula:
    """A pattern, traced: names of the dimensions of each array, scalars, the output.

    `free` are the parameters of the last operation that may have any value; `gathers`
    the inputs that stand for any number of terms, or of masks.
    """

    inputs: dict[Value, tuple[str, ...]]
    holes: dict[str, Value]
    out: Value
    free: frozenset[str] = frozenset()
    gathers: frozenset[Value] = frozenset()
