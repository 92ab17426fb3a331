"""From what is known of some arrays to what is known of those around them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxmem.ir.placements import REPLICATE, Placement, Placements, Shard
from jaxmem.ir.scans import is_var


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

    def at(self, atom) -> Placement:
        return self.of.get(atom, REPLICATE) if is_var(atom) else REPLICATE

    def all_at(self, atoms: Sequence[Any]) -> list[Placement]:
        return [self.at(v) for v in atoms]

    def asked(self, eqn) -> list[Placement]:
        """How the outputs of an equation had best be cut."""
        return [self.wanted.get(v, REPLICATE) for v in eqn.outvars]

    def want(self, atoms: Sequence[Any], placements: Sequence[Placement]) -> None:
        """Notes which variables some equation, or the caller, takes cut."""
        for v, placement in zip(atoms, placements, strict=True):
            if isinstance(placement, Shard) and is_var(v) and v not in self.of:
                self.wanted.setdefault(v, placement)

    def put(self, v, placement: Placement) -> None:
        if placement != REPLICATE:
            self.of[v] = placement

    def place(self, i: int, eqn, found: Placements) -> None:
        """Takes in how an equation works."""
        self.placed[i] = found
        self.want(eqn.invars, found.ins)
        for v, placement in zip(eqn.outvars, found.outs, strict=True):
            self.put(v, placement)
