"""Which operations of a body can be done apart from it, and what they need of it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxmem import _compat
from jaxmem.ir.graph import JaxprGraph, Values
from jaxmem.ir.scans import is_var
from jaxmem.ir.types import Atom


@dataclass(frozen=True)
class BodyParts:
    """The operations that make some variables of a body.

    Attributes:
      graph: of the body.
      eqns: positions of those that can be done apart.
      needed: variables that the body itself has to give them.
      constant: variables that are made of nothing; they are made where they are read.
    """

    graph: JaxprGraph
    eqns: tuple[int, ...]
    needed: tuple[Any, ...]
    constant: frozenset[Any]

    @classmethod
    def of(
        cls, graph: JaxprGraph, wanted: Iterable[Any], given: set[Any]
    ) -> "BodyParts":
        """The parts that make `wanted`; `given`: what they have without the body."""
        wanted = [v for v in wanted if is_var(v)]
        cone = sorted(graph.cone(wanted))
        read = {*wanted, *(v for i in cone for v in graph.eqns[i].invars if is_var(v))}
        known = {v for v in graph.invars if v in given or is_plain(v)}
        needed = [v for v in graph.arguments if v in read and v in known - given]
        eqns, constant = [], set()
        for i in cone:
            eqn = graph.eqns[i]
            ins, outs = (
                {v for v in vs if is_var(v)} for vs in (eqn.invars, eqn.outvars)
            )
            plain = {v for v in outs if is_plain(v)}
            # the body itself does what may be done once, what gives a key of random
            # numbers, and what reads something that only the body has
            if _compat.has_side_effects(eqn) or plain < outs or not ins <= known:
                needed += (v for v in eqn.outvars if v in plain & read)
            elif ins <= constant:
                # to make it where it is read takes less than to hand it over
                constant |= outs
            else:
                eqns.append(i)
            known |= plain
        return cls(graph, tuple(eqns), tuple(needed), frozenset(constant))

    def given_to(self, atoms: Iterable[Any]) -> list[Any]:
        """The variables of which a part that reads these has to be given the values."""
        read = (v for v in atoms if is_var(v) and v not in self.constant)
        # constants of the trace are at hand in every part
        return [v for v in dict.fromkeys(read) if v not in self.graph.constants]

    def made(self, i: int) -> list[Any]:
        """What a part makes for others."""
        outs = self.graph.eqns[i].outvars
        return [v for v in outs if v in self.graph.users or v in self.graph.outputs]

    def run(self, known: Mapping[Any, Any], atoms: Sequence[Any]) -> list[Any]:
        """The values of these, of the values that are known."""
        values = Values(self.graph, {**self.graph.constants, **known})
        return [values.read(v) for v in atoms]


def is_plain(v: Atom) -> bool:
    """Whether an array can be handed on from a body; keys of random numbers cannot."""
    return not jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended)


Run = Callable[[list[Any]], list[Any]]
