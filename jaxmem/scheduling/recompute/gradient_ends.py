"""Where the gradients of parameters are done.

A product that gives the gradient of a weight is read by nobody in the backward pass, so
XLA may put it off, and what it reads of each layer stays: in a BERT of twelve layers
1.3 GiB, at the end of the step. A layer whose products are computed again waits for
those of the layer behind it.
"""

from jaxmem.ir import primitives
from jaxmem.ir.communication import sent
from jaxmem.ir.graph import JaxprGraph, is_transposed
from jaxmem.ir.scans import is_var
from jaxmem.ir.shards import Shardings
from jaxmem.ir.types import Var


def gradient_ends(graph: JaxprGraph, shardings: Shardings) -> set[Var]:
    """Products and sums of the backward pass that no other one needs, as they leave it.

    Moved and cast as its last equations do: a product writes what it gives in the
    layout that these ask for. Not those that devices add up: they are sent while the
    next layers are computed.
    """
    ends: set[Var] = set()
    needed: set[Var] = set()  # by such a product or sum
    for eqn in reversed(graph.eqns):
        needs = any(v in needed for v in eqn.outvars)
        sums = primitives.is_product(eqn) or primitives.is_reduction(eqn)
        if sums and is_transposed(eqn):
            if not needs and not sent(eqn, shardings):
                ends.update(_last(graph, v) for v in eqn.outvars)
            needs = True
        if needs:
            needed.update(filter(is_var, eqn.invars))
    return ends


def _last(graph: JaxprGraph, v: Var) -> Var:
    """What becomes of it while nothing but moves and casts reads it."""
    while v not in graph.outputs and len(users := graph.users.get(v, ())) == 1:
        eqn = graph.eqns[users[0]]
        if not (primitives.of(eqn).moves and is_transposed(eqn)):
            break
        (v,) = eqn.outvars
    return v
