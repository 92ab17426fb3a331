"""From what is known of some arrays to what is known of those around them."""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxmem.ir.placements import REPLICATE, Placement, Placements, Shard
from jaxmem.ir.scans import is_var
from jaxmem.ir.types import Atom, JaxprEqn, Var


class Worklist:
    """What is to be looked at: the least rank first, of equals what came first."""

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Any]] = []
        self._order = itertools.count()

    def push(self, rank, thing) -> None:
        heapq.heappush(self._heap, (rank, next(self._order), thing))

    def __iter__(self) -> Iterator[Any]:
        """All things, those too that are pushed meanwhile."""
        while self._heap:
            yield heapq.heappop(self._heap)[-1]


@dataclass
class Propagation:
    """What is known so far of a list of equations.

    Attributes:
      of: what a part has of each variable that is not whole.
      placed: the equations that do not work on whole arrays alone, by position.
      wanted: of whole variables that some equation takes cut: along which axis.
    """

    of: dict[Any, Placement] = field(default_factory=dict)
    placed: dict[int, Placements] = field(default_factory=dict)
    wanted: dict[Any, Placement] = field(default_factory=dict)

    def at(self, atom: Atom) -> Placement:
        return self.of.get(atom, REPLICATE) if is_var(atom) else REPLICATE

    def all_at(self, atoms: Sequence[Any]) -> list[Placement]:
        return [self.at(v) for v in atoms]

    def asked(self, eqn: JaxprEqn) -> list[Placement]:
        """How the outputs of an equation had best be cut."""
        return [self.wanted.get(v, REPLICATE) for v in eqn.outvars]

    def want(self, atoms: Sequence[Any], placements: Sequence[Placement]) -> None:
        """Notes which variables some equation, or the caller, takes cut."""
        for v, placement in zip(atoms, placements, strict=True):
            if isinstance(placement, Shard) and is_var(v) and v not in self.of:
                self.wanted.setdefault(v, placement)

    @property
    def axes(self) -> dict[Any, int]:
        """Along which axis variables are cut."""
        return {v: p.axis for v, p in self.of.items() if isinstance(p, Shard)}

    def put(self, v: Var, placement: Placement) -> None:
        if placement != REPLICATE:
            self.of[v] = placement

    def place(self, i: int, eqn: JaxprEqn, found: Placements) -> None:
        """Takes in how an equation works."""
        self.placed[i] = found
        self.want(eqn.invars, found.ins)
        for v, placement in zip(eqn.outvars, found.outs, strict=True):
            self.put(v, placement)

    def extend(self, i: int, eqn: JaxprEqn, found: Placements) -> Iterator[Any]:
        """Takes in how an equation works; the variables that it tells to be cut."""
        self.placed[i] = found
        pairs = zip([*eqn.invars, *eqn.outvars], found.ins + found.outs, strict=True)
        for v, placement in pairs:
            if isinstance(placement, Shard) and is_var(v) and v not in self.of:
                self.of[v] = placement
                yield v
