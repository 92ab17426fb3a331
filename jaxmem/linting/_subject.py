"""What the checks look at, and how they say where something is."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxmem import _compat, _jaxpr
from jaxmem.linting._report import Finding as Finding
from jaxmem.memory._module_path import parse_op_name
from jaxmem.memory._step import Step

INSTALLED = ("/site-packages/", "/dist-packages/", "<frozen ")
LEAST = 1024  # bytes from which something is worth a line
PRODUCTS = ("dot_general", "conv_general_dilated")
CALLS = ("jit", "pjit", "closed_call", *_jaxpr.TAKES_OPEN_JAXPR)


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a step for a target.

    Attributes:
      target: its name.
      hlo: the optimized program.
      aliased: the leaves in whose buffers outputs lie.
    """

    target: str
    hlo: str
    aliased: frozenset[int]


@dataclass(frozen=True)
class Subject:
    """A step at its arguments.

    Attributes:
      step: the flattened call.
      leaves: the user's own arguments, in the order of `step.leaves`.
      closed: the jaxpr as it was traced.
      live: the same without what nobody needs.
      compiled: where a target was named.
    """

    step: Step
    leaves: tuple[Any, ...]
    closed: Any
    live: Any
    compiled: Compiled | None = None


@dataclass(frozen=True)
class Level:
    """A list of equations inside a step.

    Attributes:
      jaxpr: the equations, open.
      stack: the name scopes round all of them.
      times: how often it is done, as far as loops say.
      carry: of the body of a scan, what comes from the turn before.
    """

    jaxpr: Any
    stack: str = ""
    times: int = 1
    carry: frozenset[Any] = frozenset()

    @classmethod
    def of(cls, closed) -> "Level":
        """The outermost equations of a jaxpr."""
        return cls(_jaxpr.split(closed)[0])

    @cached_property
    def makers(self) -> dict[Any, Any]:
        """Variable -> the equation that makes it."""
        return {v: eqn for eqn in self.jaxpr.eqns for v in eqn.outvars}

    def scopes(self, eqn) -> str:
        """The name scopes of an equation, from the outermost."""
        return "/".join(part for part in (self.stack, _compat.name_stack(eqn)) if part)

    def path(self, eqn) -> str:
        """The modules that an equation lies in."""
        return parse_op_name(f"{self.scopes(eqn)}/{eqn.primitive.name}").module_path

    def is_backward(self, eqn) -> bool:
        """Whether an equation belongs to a backward pass."""
        return "transpose(" in self.scopes(eqn) or is_differentiated(eqn)

    def inside(self, eqn) -> "Iterator[Level]":
        """The lists of equations that it holds."""
        for body in _jaxpr.bodies(eqn):
            jaxpr, turns, carry = _jaxpr.split(body)[0], 1, frozenset()
            if eqn.primitive.name == "scan":
                turns = eqn.params["length"]
                n_consts, n_carry = _compat.scan_counts(eqn)
                carry = frozenset(jaxpr.invars[n_consts : n_consts + n_carry])
            yield Level(jaxpr, self.scopes(eqn), self.times * turns, carry)


def levels(closed) -> Iterator[Level]:
    """Every list of equations, the outer before the inner."""

    def walk(level: Level) -> Iterator[Level]:
        yield level
        for eqn in level.jaxpr.eqns:
            for inner in level.inside(eqn):
                yield from walk(inner)

    yield from walk(Level.of(closed))


def checkpoints(closed) -> Iterator[tuple[Level, Any]]:
    """Every `jax.checkpoint` in a backward pass, with what is round it."""
    for level in levels(closed):
        for eqn in filter(is_differentiated, level.jaxpr.eqns):
            yield level, eqn


def is_differentiated(eqn) -> bool:
    """Whether it is a `jax.checkpoint` in the backward pass: computes again."""
    return bool(eqn.params.get("differentiated"))


def is_recomputed(eqn) -> bool:
    """Whether an equation was done before, in the forward pass."""
    return "rematted_computation" in _compat.name_stack(eqn)


def source(eqn) -> str:
    """The user's own line that led to an equation; a library's, if there is none."""
    return _compat.caller_line(eqn, *INSTALLED) or _compat.source_line(eqn)


def place(level: Level, eqn) -> dict[str, Any]:
    """`where` and `path` of a finding."""
    return {"where": source(eqn), "path": level.path(eqn)}


def array(aval) -> str:
    """An array's type as people read it."""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
