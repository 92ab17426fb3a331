"""What the rules look at, and how they tell where something is."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxmem import _compat
from jaxmem._module_path import parse_op_name, without_repetition
from jaxmem.faults import nested
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import JaxprGraph
from jaxmem.linting._report import Finding as Finding
from jaxmem.memory.compile import CompiledProgram, FlatCall

LEAST = 1024  # bytes below which nothing is reported
# Every op of this package has such a name scope; two others are around users' code.
_OWN_SCOPE, _USERS_SCOPES = "jaxmem.", ("jaxmem.leave", "jaxmem.update")


@dataclass(frozen=True)
class Subject:
    """A step at its arguments."""

    call: FlatCall  # the step's, flattened
    leaves: tuple[Any, ...]  # the user's own arguments, in the order of `call.leaves`
    closed: Any  # the jaxpr as it was traced
    live: Any  # the same without dead code
    compiled: CompiledProgram | None = None  # the program, if a target was named
    target: str | None = None  # its name
    error: str = ""  # that the compiler ended in


@dataclass(frozen=True)
class SubjectLevel:
    """A list of equations inside a step."""

    graph: JaxprGraph
    stack: str = ""  # the name scopes around all of them
    times: int = 1  # how often they run, as far as the lengths of loops are known
    # of the body of a scan, what comes from the iteration before
    carry: frozenset[Any] = frozenset()
    line: str = ""  # the user's line that led to the equation around them
    # whether they are a function of a library. jax traces such a function once, and the
    # equations have the lines of its first caller
    library: bool = False

    @classmethod
    def of(cls, closed) -> "SubjectLevel":
        """The outermost equations of a jaxpr."""
        return cls(JaxprGraph(closed))

    def maker(self, v) -> Any:
        """The equation that computes a variable, or None."""
        return self.graph.eqns[self.graph.maker[v]] if v in self.graph.maker else None

    def scopes(self, eqn) -> str:
        """The name scopes of an equation, from the outermost."""
        return "/".join(part for part in (self.stack, _compat.name_stack(eqn)) if part)

    def path(self, eqn) -> str:
        """The modules that an equation lies in."""
        path = parse_op_name(f"{self.scopes(eqn)}/{eqn.primitive.name}").module_path
        # jax repeats the scopes of a checkpoint behind those of its backward pass
        return without_repetition(path) if is_differentiated(eqn) else path

    def source(self, eqn) -> str:
        """The innermost line of the user's that led to an equation."""
        # A line of a library's, if there is none of the user's.
        return self._line_of(eqn) or _compat.source_line(eqn)

    def _line_of(self, eqn) -> str:
        line = _users_line(eqn)
        line = self.line if self.library and self.line else line or self.line
        if line or _OWN_SCOPE not in self.scopes(eqn):
            return line
        # jax traces an op of this package once, and has no line of its second caller:
        # another equation of the op, or of the module that it is in, has the line
        path = self.path(eqn)
        module = path[: path.index(_OWN_SCOPE)].rstrip("/")
        return self._lines.get(path) or self._lines.get(module, "")

    @cached_property
    def _lines(self) -> dict[str, str]:
        """Module path -> the user's line of the last equation there."""
        lines = ((eqn, _users_line(eqn)) for eqn in self.graph.eqns)
        return {self.path(eqn): line for eqn, line in lines if line}

    def is_backward(self, eqn) -> bool:
        """Whether an equation belongs to a backward pass."""
        return "transpose(" in self.scopes(eqn) or is_differentiated(eqn)

    def inside(self, eqn) -> "Iterator[SubjectLevel]":
        """The lists of equations inside an equation."""
        for body in jaxprs.bodies(eqn):
            graph, length, carry = JaxprGraph(body), 1, frozenset()
            if primitives.is_scan(eqn):
                length = eqn.params["length"]
                n_consts, n_carry = _compat.scan_counts(eqn)
                carry = frozenset(graph.arguments[n_consts : n_consts + n_carry])
            function = _compat.function_source(jaxprs.split(body)[0])
            line = self._line_of(eqn)
            folders = (*_compat.INSTALLED, *_compat.OWN)
            library = any(folder in function for folder in folders)
            times = self.times * length
            yield SubjectLevel(graph, self.scopes(eqn), times, carry, line, library)


def levels(closed) -> Iterator[SubjectLevel]:
    """Every list of equations."""
    return nested(SubjectLevel.of(closed))


def scans(closed) -> Iterator[tuple[SubjectLevel, Any]]:
    """Every scan, with the level that it is in."""
    every = ((level, eqn) for level in levels(closed) for eqn in level.graph.eqns)
    return (pair for pair in every if primitives.is_scan(pair[1]))


def checkpoints(closed) -> Iterator[tuple[SubjectLevel, Any]]:
    """Every `jax.checkpoint` in a backward pass, with the level that it is in."""
    # Those inside ops of this package are left out: the user did not write them.
    for level in levels(closed):
        for eqn in filter(is_differentiated, level.graph.eqns):
            if not is_own(level, eqn):
                yield level, eqn


def is_own(level: SubjectLevel, eqn) -> bool:
    """Whether this package wrote an equation, and not the user."""
    # The scope tells it of an op that has taken the place of a formula, whose line it
    # has. The line tells it of the modules of this package outside of ops.
    scopes = level.scopes(eqn)
    for scope in _USERS_SCOPES:
        scopes = scopes.replace(scope, "")
    return _OWN_SCOPE in scopes or _compat.is_own_line(eqn)


def is_differentiated(eqn) -> bool:
    """Whether it is a `jax.checkpoint` in a backward pass, which recomputes."""
    return bool(eqn.params.get("differentiated"))


def is_recomputed(eqn) -> bool:
    return _compat.RECOMPUTED in _compat.name_stack(eqn)


def _users_line(eqn) -> str:
    return _compat.caller_line(eqn, *_compat.INSTALLED)


def place(level: SubjectLevel, eqn) -> dict[str, Any]:
    """`where` and `path` of a finding."""
    return {"where": level.source(eqn), "path": level.path(eqn)}


def array(aval) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
