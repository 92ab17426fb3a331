"""Zeros that XLA:GPU makes early, for the gradient of a maximum over windows.

That gradient is scattered into zeros. Where what is pooled is the relu of a convolution
and its bias, one kernel makes these zeros together with those that the relu compares
with, before the pool, and they wait for the backward pass. (Read off compiled AlexNet
and VGG; nothing of the kind is seen with a batch norm in between, or where the relu is
there anyway for another reader.)
"""

from typing import Any

from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.layer_axis import ELEMENTWISE
from jaxmem.ir.scans import is_var

POOL, GRADIENT = "reduce_window_max", "select_and_scatter_add"


def early_zeros(graph: JaxprGraph) -> dict[int, Any]:
    """Position of a pool, or of its gradient -> the array that both read."""
    found: dict[int, Any] = {}
    for i, eqn in enumerate(graph.eqns):
        if eqn.primitive.name != GRADIENT:
            continue
        pooled = eqn.invars[1]
        readers = {_name(graph, u): u for u in graph.users[pooled]}
        alone = readers.keys() <= {POOL, GRADIENT, *ELEMENTWISE}
        if POOL in readers and alone and _is_relu_of_convolution(graph, pooled):
            found |= {readers[POOL]: pooled, i: pooled}
    return found


def _is_relu_of_convolution(graph: JaxprGraph, v) -> bool:
    """Whether `v` is max(convolution + bias, 0)."""
    for name in ("max", "add"):
        eqn = _made_by(graph, v, name)
        ins = [] if eqn is None else eqn.invars
        # the bias is broadcast, or of one row; the zero is a literal
        same = [w for w in ins if is_var(w) and w.aval.shape == v.aval.shape]
        made = [w for w in same if not _made_by(graph, w, "broadcast_in_dim")]
        if len(made) != 1:
            return False
        v = made[0]
    return _made_by(graph, v, "conv_general_dilated") is not None


def _made_by(graph: JaxprGraph, v, name: str):
    """The equation of this name that makes `v`, if one does."""
    i = graph.maker.get(v)
    return None if i is None or _name(graph, i) != name else graph.eqns[i]


def _name(graph: JaxprGraph, i: int) -> str:
    return graph.eqns[i].primitive.name
