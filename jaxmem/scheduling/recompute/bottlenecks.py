"""Values through which the whole forward pass goes: the inputs of its layers.

Where all of two layers is recomputed, the second one's input costs hardly more: the
first layer's own backward pass needs the rest. A minimum cut does not keep it then, and
both layers' arrays exist at once. With it, only one layer's do.
"""

from collections.abc import Callable, Set
from typing import Any

from jaxmem.ir import primitives
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.scans import is_var

# Of the equations of the forward pass: what is read for longer, such as a table of
# positions, is beside the layers.
_LONG = 0.25


def bottlenecks(
    graph: JaxprGraph, late: Set[int], size: Callable[[Any], float], least: float
) -> tuple[Any, ...]:
    """Large values that are the only ones that exist at some time of the forward pass.

    One between two products: of several the smallest, as a cast has another one.
    """
    early = [i for i in range(len(graph.eqns)) if i not in late]
    place = {i: k for k, i in enumerate(early)}
    last: dict[Any, int] = {}  # variable -> the place of its last reader
    for i in early:
        last.update((v, place[i]) for v in graph.eqns[i].invars if is_var(v))
    weights = set(graph.invars)  # and what they are cast to: the backward pass has both
    live: dict[Any, None] = {}
    found: dict[int, Any] = {}  # by how many products came before
    products = 0
    for k, i in enumerate(early):
        eqn = graph.eqns[i]
        products += primitives.is_product(eqn)
        if primitives.is_cast(eqn) and eqn.invars[0] in weights:
            weights.update(eqn.outvars)
            continue
        for v in eqn.outvars:
            if size(v) >= least and k < last.get(v, -1) <= k + _LONG * len(early):
                live[v] = None
        live = {v: None for v in live if last[v] > k}
        if len(live) == 1:
            (v,) = live
            best = found.get(products)
            if best is None or size(v) <= size(best):
                found[products] = v
    return tuple(dict.fromkeys(found.values()))
