"""How far two orders of a step's sums may lead apart, counted on its jaxpr."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmem.ir import jaxprs
from jaxmem.ir.jaxprs import elements
from jaxmem.ir.scans import is_var


def longest(body) -> int:
    """Roundings on the longest path from an argument to a result.

    An equation rounds its result once, and a sum of k terms k times, in any order.
    """
    jaxpr, _ = jaxprs.split(body)
    depth: dict[Any, int] = {}
    for eqn in jaxpr.eqns:
        before = max((depth.get(a, 0) for a in eqn.invars if is_var(a)), default=0)
        own = before + _roundings(eqn)
        depth |= dict.fromkeys(eqn.outvars, own)
    return max((depth.get(v, 0) for v in jaxpr.outvars if is_var(v)), default=0)


def _roundings(eqn) -> int:
    inside = max((longest(body) for body in jaxprs.bodies(eqn)), default=0)
    if inside:
        return inside * eqn.params.get("length", 1)
    if not any(jnp.issubdtype(v.aval.dtype, np.inexact) for v in eqn.outvars):
        return 0
    return _terms(eqn)


def _terms(eqn) -> int:
    """Of the sums that an equation makes; 1 where it makes none."""
    shapes = [a.aval.shape for a in eqn.invars]
    out = elements(eqn.outvars[0].aval.shape)
    if eqn.primitive.name == "dot_general":
        return elements([shapes[0][a] for a in eqn.params["dimension_numbers"][0][0]])
    if eqn.primitive.name == "conv_general_dilated":
        return elements(shapes[1])
    if eqn.primitive.name.startswith(("reduce_", "scatter")):
        return max(1, max(map(elements, shapes)) // max(1, out))
    if eqn.primitive.name.startswith("cum"):
        return shapes[0][eqn.params["axis"]]
    return 1
