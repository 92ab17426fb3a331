"""What the checks look at, and how they say where something is."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxmem import _compat, _jaxpr
from jaxmem.linting._report import Finding as Finding
from jaxmem.memory._module_path import parse_op_name
from jaxmem.memory._step import Step

LEAST = 1024  # bytes from which something is worth a line
PRODUCTS = ("dot_general", "conv_general_dilated")
CALLS = ("jit", "pjit", "closed_call", *_jaxpr.TAKES_OPEN_JAXPR)
# Every op of this package works in such a scope; the others are put round users' code.
_OWN_SCOPE, _USERS_SCOPES = "jaxmem.", ("jaxmem.leave", "jaxmem.update")


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
      carry: of the body of a scan, what comes from the iteration before.
      line: the user's line that led to the equation round them.
      library: whether they are a function of a library's: jax traces it once, and what
        it notes of the caller is the first one's.
    """

    jaxpr: Any
    stack: str = ""
    times: int = 1
    carry: frozenset[Any] = frozenset()
    line: str = ""
    library: bool = False

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
        path = parse_op_name(f"{self.scopes(eqn)}/{eqn.primitive.name}").module_path
        # jax puts the scopes of a checkpoint behind those of its backward pass
        return _once(path) if is_differentiated(eqn) else path

    def source(self, eqn) -> str:
        """The user's own line that led to an equation; a library's, if there is none.

        The innermost one: in a model of the user's the line of the module, else the
        line that calls the model.
        """
        return self._line_of(eqn) or _compat.source_line(eqn)

    def _line_of(self, eqn) -> str:
        line = _users_line(eqn)
        line = self.line if self.library and self.line else line or self.line
        if line or _OWN_SCOPE not in self.scopes(eqn):
            return line
        # jax traces an op of ours once, and forgets who asked for it the second time:
        # another equation of the op, or of the module it is in, knows
        path = self.path(eqn)
        module = path[: path.index(_OWN_SCOPE)].rstrip("/")
        return self._lines.get(path) or self._lines.get(module, "")

    @cached_property
    def _lines(self) -> dict[str, str]:
        """The modules an equation lies in -> the user's line of the last such one."""
        found = (
            (e, _compat.caller_line(e, *_compat.INSTALLED)) for e in self.jaxpr.eqns
        )
        return {self.path(eqn): line for eqn, line in found if line}

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
            line, made_by = self._line_of(eqn), _compat.function_source(jaxpr)
            library = any(
                part in made_by for part in (*_compat.INSTALLED, *_compat.OWN)
            )
            times = self.times * turns
            yield Level(jaxpr, self.scopes(eqn), times, carry, line, library)


def levels(closed) -> Iterator[Level]:
    """Every list of equations, the outer before the inner."""

    def walk(level: Level) -> Iterator[Level]:
        yield level
        for eqn in level.jaxpr.eqns:
            for inner in level.inside(eqn):
                yield from walk(inner)

    yield from walk(Level.of(closed))


def checkpoints(closed) -> Iterator[tuple[Level, Any]]:
    """Every `jax.checkpoint` of the user's in a backward pass, with what is round it.

    Those inside this package's ops are the ops' own business.
    """
    for level in levels(closed):
        for eqn in filter(is_differentiated, level.jaxpr.eqns):
            if not is_own(level, eqn):
                yield level, eqn


def is_own(level: Level, eqn) -> bool:
    """Whether this package wrote an equation, and not the user.

    By its scope where an op was put in the place of a formula, whose line it then has;
    by its line where a module of this package has it outside of an op.
    """
    scopes = level.scopes(eqn)
    for scope in _USERS_SCOPES:
        scopes = scopes.replace(scope, "")
    return _OWN_SCOPE in scopes or _compat.is_own_line(eqn)


def is_differentiated(eqn) -> bool:
    """Whether it is a `jax.checkpoint` in the backward pass: computes again."""
    return bool(eqn.params.get("differentiated"))


def is_recomputed(eqn) -> bool:
    """Whether an equation was done before, in the forward pass."""
    return "rematted_computation" in _compat.name_stack(eqn)


def _users_line(eqn) -> str:
    return _compat.caller_line(eqn, *_compat.INSTALLED)


def _once(path: str) -> str:
    """`M/norm/norm` and `M/norm/M/norm` without the repetition."""
    parts = path.split("/")
    for size in range(len(parts) // 2, 0, -1):
        if parts[-size:] == parts[-2 * size : -size]:
            return "/".join(parts[:-size])
    return path


def place(level: Level, eqn) -> dict[str, Any]:
    """`where` and `path` of a finding."""
    return {"where": level.source(eqn), "path": level.path(eqn)}


def array(aval) -> str:
    """An array's type as people read it."""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
