"""Two backward passes: one for a number made of all gradients, one that updates.

Clipping by the global norm (or a trust ratio over a whole stack) needs every gradient
before the first update, so that no layer can be updated when its gradient appears. The
backward scan is therefore done twice: the first time for the numbers alone, for which
the gradients are summed up layer by layer and dropped; the second time with the numbers
known. LOMO does the same to clip (Lv et al. 2023, section 3.2).
"""

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.ir.graph import JaxprGraph, Values
from jaxmem.scheduling.release.after_scan import blockers


def blocked_scans(closed) -> list[int]:
    """Positions of the scans that some number over all layers holds up."""
    graph = JaxprGraph(closed)
    return [
        i
        for i, eqn in enumerate(graph.eqns)
        if eqn.primitive.name == "scan"
        and not _compat.has_side_effects(eqn)
        and blockers(graph, i)
    ]


def two_pass(closed, scan: int):
    """The jaxpr with the scan done twice, the first time for what holds it up."""
    graph = JaxprGraph(closed)
    first = blockers(graph, scan)
    later = graph.after(scan)
    cone = sorted({scan, *graph.cone(first, later)})

    def run(args: list) -> list:
        values = Values(graph, graph.inputs(args))
        values.evaluate_before(scan)
        numbers = Values(graph, dict(values.env), set(values.done))
        for i in cone:
            numbers.evaluate(i)
        values.env |= {v: numbers.env[v] for v in first}
        made = (all(v in values.env for v in graph.eqns[i].outvars) for i in cone)
        values.done |= {i for i, known in zip(cone, made, strict=True) if known}
        return values.all_outputs()

    return _compat.without_dead_code(jaxprs.retrace(closed, run))
