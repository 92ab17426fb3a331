"""What a step keeps from its forward pass for its backward pass.

`jaxmem.residuals` tells it of a function that is to be differentiated; here the step
has been, and the two passes are told apart by the name scopes that JAX gives them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from jaxmem.ir.scans import is_var, size_of
from jaxmem.linting._subject import CALLS, LEAST, Level, is_own

# an array as another is, or a part of it
_VIEWS = frozenset("name reduce_precision copy reshape squeeze transpose".split())


@dataclass(frozen=True)
class Made:
    """A value where it was made.

    Attributes:
      level: the equations it is among.
      var: its variable there.
      eqn: what makes it; None for what comes from outside.
      source: where that was written; of what jax itself wrote, where it was called.
      calls: the equations round it, by identity: a function that is called twice has
        the same variables twice.
    """

    level: Level
    var: Any
    eqn: Any
    source: str = ""
    calls: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells one value from another."""
        return *self.calls, self.var

    @property
    def is_own(self) -> bool:
        """Whether an op of ours makes it, and its docstring says what it keeps."""
        return self.eqn is not None and is_own(self.level, self.eqn)

    def place(self) -> dict[str, Any]:
        """`where` and `path` of a finding."""
        return {"where": self.source, "path": self.level.path(self.eqn)}


@dataclass(frozen=True)
class Kept:
    """A value that the backward pass reads and the forward pass made.

    Attributes:
      bytes: of the whole array; of a scan, with all iterations.
      var: its variable among the equations that hold both passes.
      made: what it is, where it was made.
    """

    bytes: int
    var: Any
    made: Made


def kept(level: Level) -> Iterator[Kept]:
    """Each value once; those of inner loops that hold both passes too."""
    made: set[Any] = set()
    seen: set[Any] = set()
    for eqn in level.jaxpr.eqns:
        if level.is_backward(eqn):
            for v in filter(is_var, eqn.invars):
                if v in made and v not in seen and size_of(v) >= LEAST:
                    seen.add(v)
                    yield Kept(size_of(v), v, origin(level, v))
            continue
        made.update(eqn.outvars)
        for inner in level.inside(eqn):
            yield from kept(inner)


def origin(level: Level, var) -> Made:
    """Where a value comes from, through views and into loops and calls."""
    while (eqn := level.makers.get(var)) is not None:
        line = level.source(eqn)
        if inner := _holder(level, eqn):
            out = inner.jaxpr.outvars[eqn.outvars.index(var)]
            found = origin(inner, out) if is_var(out) else Made(level, var, eqn, line)
            given = _operand(eqn, inner, found)
            if given is None:
                calls = (id(eqn), *found.calls)
                return replace(found, calls=calls)
        else:
            given = eqn.invars[0] if eqn.primitive.name in _VIEWS else None
            if not _is_same(given, var):
                return Made(level, var, eqn, line)
        var = given
    return Made(level, var, None)


def _holder(level: Level, eqn) -> Level | None:
    """The body of a loop or a call that has its outputs."""
    fits = (i for i in level.inside(eqn) if len(i.jaxpr.outvars) == len(eqn.outvars))
    return next(fits, None)


def _operand(eqn, inner: Level, found: Made) -> Any:
    """What a call was given that it hands on as it is."""
    inputs = inner.jaxpr.invars
    if eqn.primitive.name not in CALLS or found.var not in inputs:
        return None
    given = eqn.invars[inputs.index(found.var)]
    return given if is_var(given) else None


def _is_same(given, var) -> bool:
    return given is not None and is_var(given) and given.aval.dtype == var.aval.dtype
