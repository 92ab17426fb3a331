"""Small questions about `shard_map` equations."""

from typing import Any

from jaxmem.ir import jaxprs


def mapped_axes(eqn) -> frozenset[str]:
    """The axes of the mesh that a `shard_map` is over; XLA has the others."""
    key = "newly_manual_axes" if "newly_manual_axes" in eqn.params else "manual_axes"
    return frozenset(eqn.params[key])


def operations_of(eqn) -> list[Any]:
    """The operations of a `shard_map`; else the equation itself."""
    if eqn.primitive.name != "shard_map":
        return [eqn]
    return [e for e in jaxprs.bodies(eqn)[0].eqns if not is_of_number(e)]


def is_of_number(eqn) -> bool:
    """Whether it makes a number an array of one element, or the reverse."""
    if eqn.primitive.name not in ("reshape", "squeeze", "broadcast_in_dim"):
        return False
    shapes = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return shapes in (((), (1,)), ((1,), ()))
