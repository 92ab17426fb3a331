"""Which equations of a train step belong to its backward pass."""

from typing import Any

from jaxmem import _compat
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.scans import is_var


def is_transposed(eqn) -> bool:
    """Whether the backward pass made an equation; its name scopes tell."""
    return "transpose(" in _compat.name_stack(eqn)


def late_of(graph: JaxprGraph) -> set[int]:
    """The equations of the backward pass and of all that comes after it."""
    found: set[int] = set()
    made: set[Any] = set()
    for i, eqn in enumerate(graph.eqns):
        if is_transposed(eqn) or any(is_var(v) and v in made for v in eqn.invars):
            found.add(i)
            made.update(eqn.outvars)
    return found
