"""A scatter that is a program of its own, as eager differentiation makes it."""

from collections.abc import Iterator
from typing import Any

from jaxmem.faults.program import TracedProgram, levels
from jaxmem.ir import primitives
from jaxmem.ir.jaxprs import called


def lone_scatters(program: TracedProgram) -> Iterator[tuple[Any, str]]:
    """Finds a program that is one scatter-add, along an axis behind the first."""
    eqns = [
        eqn
        for level in levels(program.closed)
        if level.eqn is None or called(level.eqn) is not None
        for eqn in level.graph.eqns
        if not _is_beside(eqn) and called(eqn) is None
    ]
    if len(eqns) != 1 or not primitives.is_scatter_add(eqns[0]):
        return
    (eqn,) = eqns
    axes = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
    if axes and min(axes) > 0:
        yield eqn, "a scatter-add compiled by itself, whose result lacks rows"


def _is_beside(eqn) -> bool:
    """Whether it is there beside the scatter: its zeros, or a copy."""
    return primitives.is_broadcast(eqn) or primitives.of(eqn).same
