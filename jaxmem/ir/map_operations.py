"""Small questions about `shard_map` equations."""

import math
from typing import Any

from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.primitives import Kind


def mapped_axes(eqn) -> frozenset[str]:
    """The axes of the mesh that a `shard_map` is over; XLA has the others."""
    key = "newly_manual_axes" if "newly_manual_axes" in eqn.params else "manual_axes"
    return frozenset(eqn.params[key])


def devices_of(eqn) -> int:
    """Among how many devices a `shard_map` runs, each doing the whole of its body."""
    return math.prod(eqn.params["mesh"].shape[name] for name in mapped_axes(eqn))


def operations_of(eqn) -> list[Any]:
    """The operations of a `shard_map`; else the equation itself."""
    if not primitives.is_shard_map(eqn):
        return [eqn]
    return [e for e in jaxprs.bodies(eqn)[0].eqns if not is_of_number(e)]


def is_of_number(eqn) -> bool:
    """Whether it makes a number an array of one element, or the reverse."""
    if primitives.of(eqn).kind is not Kind.SHAPE:
        return False
    shapes = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return shapes in (((), (1,)), ((1,), ()))
