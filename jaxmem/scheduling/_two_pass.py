"""Two backward passes: one for a number made of all gradients, one that updates.

Clipping by the global norm (or a trust ratio over a whole stack) needs every gradient
before the first update, so that no layer can be updated when its gradient appears. The
backward scan is therefore done twice: the first time for the numbers alone, for which
the gradients are summed up layer by layer and dropped; the second time with the numbers
known. LOMO does the same to clip (Lv et al. 2023, section 3.2).
"""

from typing import Any

from jaxmem import _compat, _jaxpr
from jaxmem.scheduling._graph import Graph
from jaxmem.scheduling._release import blockers
from jaxmem.scheduling._scans import is_var


def blocked_scans(closed) -> list[int]:
    """Positions of the scans that some number over all layers holds up."""
    graph = Graph(closed)
    return [
        i
        for i, eqn in enumerate(graph.eqns)
        if eqn.primitive.name == "scan"
        and not _compat.has_side_effects(eqn)
        and blockers(graph, i)
    ]


def two_pass(closed, scan: int):
    """The jaxpr with the scan done twice, the first time for what holds it up."""
    graph = Graph(closed)
    first = blockers(graph, scan)
    later = graph.after(scan)
    cone = sorted({scan, *(i for v in first for i in graph.cone(v, later))})

    def run(args: list) -> list:
        env = graph.inputs(args)
        for i in range(len(graph.eqns)):
            if i == scan:
                numbers = dict(env)
                for k in cone:
                    _evaluate(graph, k, numbers)
                env |= {v: numbers[v] for v in first}
            _evaluate(graph, i, env)
        return [env[v] if is_var(v) else v.val for v in graph.outvars]

    return _compat.without_dead_code(_jaxpr.retrace(closed, run))


def _evaluate(graph: Graph, i: int, env: dict[Any, Any]) -> None:
    """Adds the outputs of equation `i`, and what it needs, unless they are there."""
    eqn = graph.eqns[i]
    if all(v in env for v in eqn.outvars):
        return
    for v in filter(is_var, eqn.invars):
        if v not in env:
            _evaluate(graph, graph.maker[v], env)
    outs = _compat.bind(eqn, [env[v] if is_var(v) else v.val for v in eqn.invars])
    env.update(zip(eqn.outvars, outs, strict=True))
