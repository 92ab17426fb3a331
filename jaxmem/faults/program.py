"""A traced step, as the finders look at it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.primitives import Kind


@dataclass(frozen=True)
class TracedProgram:
    """A traced step.

    Attributes:
      closed: its jaxpr, without dead code.
      donated: positions of the inputs whose buffers it may reuse.
      devices: over how many its arrays are sharded; 1 where that is not known.
      distributed: whether devices of other processes take part.
    """

    closed: Any
    donated: frozenset[int] = frozenset()
    devices: int = 1
    distributed: bool = False


def processes_are_joined() -> bool:
    """Whether this process is one of several, or is prepared to be."""
    return jax.distributed.is_initialized()


@dataclass(frozen=True, eq=False)
class ProgramLevel:
    """A list of equations in a program, and the equation that it is inside of."""

    graph: JaxprGraph
    eqn: Any = None
    outer: "ProgramLevel | None" = None

    def inside(self, eqn) -> "Iterator[ProgramLevel]":
        """The lists of equations inside an equation of this one."""
        for body in jaxprs.bodies(eqn):
            yield ProgramLevel(JaxprGraph(body), eqn, self)

    def made(self, v) -> "tuple[ProgramLevel, Any] | None":
        """What computes a variable: below copies, inside calls, outside of them.

        The list and the equation; None of an input of a loop or of the program.
        """
        level: ProgramLevel | None = self
        while level is not None and jaxprs.is_var(v):
            i = level.graph.maker.get(v)
            if i is None:
                level, v = level.given(v)
                continue
            eqn = level.graph.eqns[i]
            if primitives.of(eqn).kind is Kind.IDENTITY:
                v = eqn.invars[0]
            elif (body := jaxprs.called(eqn)) is not None:
                level = ProgramLevel(JaxprGraph(body), eqn, level)
                v = level.graph.outvars[eqn.outvars.index(v)]
            else:
                return level, eqn
        return None

    def given(self, v) -> "tuple[ProgramLevel | None, Any]":
        """The operand that an input of a call is, in the list that calls it."""
        if self.eqn is None or jaxprs.called(self.eqn) is None:
            return None, v
        if v not in self.graph.arguments:
            return None, v
        return self.outer, self.eqn.invars[self.graph.arguments.index(v)]

    def root(self, v) -> Any:
        """The variable that this one is a copy of, in the list of the loop around."""
        level = self
        while jaxprs.is_var(v):
            i = level.graph.maker.get(v)
            if i is not None:
                eqn = level.graph.eqns[i]
                if primitives.of(eqn).kind is not Kind.IDENTITY:
                    break
                v = eqn.invars[0]
                continue
            outer, w = level.given(v)
            if outer is None:
                break
            level, v = outer, w
        return v

    @property
    def in_loop(self) -> bool:
        """Whether a loop is around it."""
        level: ProgramLevel | None = self
        while level is not None:
            if level.eqn is not None and primitives.is_loop(level.eqn):
                return True
            level = level.outer
        return False


def nested(level: Any) -> Iterator[Any]:
    """A list of equations and all inside of it, the outer before the inner."""
    yield level
    for eqn in level.graph.eqns:
        for inner in level.inside(eqn):
            yield from nested(inner)


def levels(closed) -> Iterator[ProgramLevel]:
    """Every list of equations."""
    return nested(ProgramLevel(JaxprGraph(closed)))
