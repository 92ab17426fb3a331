"""Small questions about `shard_map` equations."""

from typing import Any

from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.primitives import Kind
from jaxmem.ir.types import JaxprEqn


def mapped_axes(eqn: JaxprEqn) -> frozenset[str]:
    """The axes of the mesh that a `shard_map` is over; XLA has the others."""
    key = "newly_manual_axes" if "newly_manual_axes" in eqn.params else "manual_axes"
    return frozenset(eqn.params[key])


def operations_of(eqn: JaxprEqn) -> list[Any]:
    """The operations of a `shard_map`; else the equation itself."""
    if not primitives.is_shard_map(eqn):
        return [eqn]
    return [e for e in jaxprs.bodies(eqn)[0].eqns if not is_of_number(e)]


def is_of_number(eqn: JaxprEqn) -> bool:
    """Whether it makes a number an array of one element, or the reverse."""
    if primitives.of(eqn).kind is not Kind.SHAPE:
        return False
    shapes = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return shapes in (((), (1,)), ((1,), ()))
