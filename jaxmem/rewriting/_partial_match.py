"""What a partial match has found: which value stands for which input of a formula."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from jaxmem.rewriting._flat_graph import FlatValue, Node
from jaxmem.rewriting._fold import Number, error_of

Positions = tuple[int | None, ...]


@dataclass(frozen=True)
class Bound:
    """What an input of the pattern stands for."""

    base: FlatValue  # below all casts and views that keep the indices
    positions: Positions  # of its dimensions among those of the input
    choices: tuple[tuple[FlatValue, Positions], ...]  # the values on the way to it
    sign: int = 1  # -1: the negative of that, of a mask its opposite
    # Values that are added to it: of masks, "and".
    further: "tuple[Bound, ...]" = ()

    @property
    def key(self) -> tuple:
        """What tells whether two are the same array."""
        return id(self.base), self.positions, self.sign, *(b.key for b in self.further)

    def merged(self, other: "Bound") -> "Bound":
        """One for both, which are the same array."""
        others = set(other.choices)
        common = tuple(c for c in self.choices if c in others)
        wider = other if common else min(self, other, key=Bound._error)
        return replace(wider, choices=common or wider.choices)

    def _error(self) -> float:
        return min(error_of(v.dtype) for v, _ in self.choices)


@dataclass(frozen=True)
class PartialMatch:
    """What a partial match has found."""

    inputs: dict[FlatValue, Bound]
    holes: dict[FlatValue, Number]
    covered: frozenset[Node]
    sizes: dict[str, int]

    def cover(self, nodes: Iterable[Node]) -> "PartialMatch":
        return replace(self, covered=self.covered.union(nodes)) if nodes else self


@dataclass(frozen=True)
class TracedFormula:
    """A pattern, traced: names of the dimensions of each array, scalars, the output."""

    inputs: dict[FlatValue, tuple[str, ...]]
    holes: dict[str, FlatValue]
    out: FlatValue
    free: frozenset[str] = frozenset()  # parameters of the last operation, of any value
    gathers: frozenset[FlatValue] = frozenset()  # stand for any number of terms, masks
