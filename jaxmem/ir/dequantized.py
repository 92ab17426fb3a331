"""Arrays that are cheap to have from arguments of few bits, such as quantised weights.

A weight in int8, float8 or NF4 is cast, looked up in a table of a few numbers, and
multiplied by its scales before a product reads it. All of that is a matter of the
weight's own bytes, so nobody has to keep the result.
"""

from typing import Any

import jax.numpy as jnp

from jaxmem.ir.fused import fused_only
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.scans import is_var


def is_few_bits(v: Any) -> bool:
    """Whether a variable is an array of numbers of at most eight bits."""
    dtype = getattr(v.aval, "dtype", None)
    if dtype is None or dtype == jnp.bool_:
        return False
    return getattr(dtype, "itemsize", 8) <= 1 and len(v.aval.shape) > 0


def dequantizing(graph: JaxprGraph) -> set[int]:
    """The equations that make floating arrays of arguments of few bits, and scales."""
    # Of arguments alone, and of codes among them.
    if not any(map(is_few_bits, graph.invars)):
        return set()
    given, codes = set(graph.invars), set(filter(is_few_bits, graph.invars))
    cheap: list[int] = []
    for i, eqn in enumerate(graph.eqns):
        read = [v for v in eqn.invars if is_var(v)]
        if not read or not given.issuperset(read):
            continue
        if fused_only(eqn) is None:
            continue
        given.update(eqn.outvars)
        cheap.append(i)
        if not codes.isdisjoint(read):
            codes.update(eqn.outvars)
    made = {i for i in cheap if not codes.isdisjoint(graph.eqns[i].outvars)}
    return made | _needed_by(graph, made, set(cheap))


def _needed_by(graph: JaxprGraph, made: set[int], cheap: set[int]) -> set[int]:
    """What of `cheap` the equations `made` need: the way of the scales."""
    needed: set[int] = set()
    for i in sorted(cheap, reverse=True):
        users = (j for v in graph.eqns[i].outvars for j in graph.users.get(v, ()))
        if any(j in made or j in needed for j in users):
            needed.add(i)
    return needed
