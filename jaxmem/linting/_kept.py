"""The values that a step keeps from its forward pass for its backward pass.

`jaxmem.residuals` lists them for a function before it is differentiated. A step has
been differentiated already, and the name scopes that JAX gives to the equations of the
two passes tell them apart.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from jaxmem.ir import primitives
from jaxmem.ir.scans import is_var, size_of
from jaxmem.linting._subject import LEAST, SubjectLevel, is_own


@dataclass(frozen=True)
class Definition:
    level: SubjectLevel  # the list of equations that has it
    var: Any  # its variable there
    eqn: Any  # the equation that computes it; None for an input of the level
    # the line of that equation; of jax's own code, the line that calls it
    source: str = ""
    # the equations around it, by identity: a function that is called twice has the same
    # variables twice
    calls: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for the same value alone."""
        return *self.calls, self.var

    @property
    def is_own(self) -> bool:
        return self.eqn is not None and is_own(self.level, self.eqn)

    def place(self) -> dict[str, Any]:
        """`where` and `path` of a finding."""
        return {"where": self.source, "path": self.level.path(self.eqn)}


@dataclass(frozen=True)
class KeptValue:
    """A value that the forward pass computes and the backward pass reads."""

    bytes: int  # of the whole array; of a scan, with all iterations
    definition: Definition  # where it is computed


def kept_values(level: SubjectLevel) -> Iterator[KeptValue]:
    """Each kept value once, with those of inner loops that contain both passes."""
    forward: set[Any] = set()
    seen: set[Any] = set()
    for eqn in level.graph.eqns:
        if level.is_backward(eqn):
            for v in filter(is_var, eqn.invars):
                if v in forward and v not in seen and size_of(v) >= LEAST:
                    seen.add(v)
                    yield KeptValue(size_of(v), definition_of(level, v))
            continue
        forward.update(eqn.outvars)
        for inner in level.inside(eqn):
            yield from kept_values(inner)


def definition_of(level: SubjectLevel, var) -> Definition:
    """Where a value is computed: below views, and inside loops and calls."""
    while (eqn := level.maker(var)) is not None:
        line = level.source(eqn)
        if inner := _body(level, eqn):
            out = inner.graph.outvars[eqn.outvars.index(var)]
            if not is_var(out):
                return Definition(level, var, eqn, line, (id(eqn),))
            definition = definition_of(inner, out)
            operand = _unchanged_operand(eqn, inner, definition)
            if operand is None:
                calls = (id(eqn), *definition.calls)
                return replace(definition, calls=calls)
        else:
            operand = eqn.invars[0] if _is_view(eqn) else None
            if not _has_data_of(operand, var):
                return Definition(level, var, eqn, line)
        var = operand
    return Definition(level, var, None)


def _body(level: SubjectLevel, eqn) -> SubjectLevel | None:
    """The body of a loop or a call with the same outputs."""
    fits = (i for i in level.inside(eqn) if len(i.graph.outvars) == len(eqn.outvars))
    return next(fits, None)


def _unchanged_operand(eqn, inner: SubjectLevel, definition: Definition) -> Any:
    """The operand of a call that the call returns unchanged, or None."""
    inputs = inner.graph.arguments
    if not primitives.of(eqn).calls or definition.var not in inputs:
        return None
    operand = eqn.invars[inputs.index(definition.var)]
    return operand if is_var(operand) else None


def _is_view(eqn) -> bool:
    return primitives.of(eqn).shows and not primitives.is_barrier(eqn)


def _has_data_of(operand, var) -> bool:
    if operand is None or not is_var(operand):
        return False
    ours, of_operand = var.aval, operand.aval
    return of_operand.dtype == ours.dtype and of_operand.size == ours.size
