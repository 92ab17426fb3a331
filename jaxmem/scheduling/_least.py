"""The fewest bytes from which a set of values can be made again.

A minimum cut: each variable is an edge with its bytes as capacity, between what cannot
be made again and what is wanted. Of several cuts of the same bytes it is the one
nearest to what is wanted, so that the least is computed twice. (The partitioners of
AOTAutograd and of nvFuser cut forward from backward in the same way.)
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from jaxmem.scheduling._graph import Graph
from jaxmem.scheduling._scans import is_var, size_of

_MOST = 2**28  # of a capacity: flows are int32
_ENDLESS = 2**30
_SOURCE, _SINK = 0, 1


def least(graph: Graph, wanted: Iterable[Any], free: set[Any], again) -> list[Any]:
    """Variables to keep so that all of `wanted` can be made of them and of `free`.

    `again(eqn)` says whether an equation may be evaluated a second time.
    """
    wanted = [v for v in dict.fromkeys(wanted) if v not in free]
    nodes = list(_makers(graph, wanted, free, again))
    place = {v: 2 + 2 * i for i, (v, _) in enumerate(nodes)}
    unit = max(1, sum(size_of(v) for v in place) // _MOST)
    edges: dict[tuple[int, int], int] = {}
    for v, ins in nodes:
        edges[place[v], place[v] + 1] = 1 + size_of(v) // unit
        for w in ins if ins is not None else ():
            if w in place:
                edges[place[w] + 1, place[v]] = _ENDLESS
        if ins is None:
            edges[_SOURCE, place[v]] = _ENDLESS
    for v in wanted:
        edges[place[v] + 1, _SINK] = _ENDLESS
    near = _reaching_sink(edges, 2 + 2 * len(nodes))
    return [v for v, i in place.items() if i not in near and i + 1 in near]


def _makers(graph: Graph, wanted: Sequence[Any], free: set[Any], again):
    """(variable, what it is made of; None: it cannot be made again), where needed."""
    todo, seen = list(wanted), set()
    while todo:
        v = todo.pop()
        if v in seen or v in free:
            continue
        seen.add(v)
        eqn = graph.eqns[graph.maker[v]] if v in graph.maker else None
        ins = None
        if eqn is not None and again(eqn):
            ins = [w for w in eqn.invars if is_var(w)]
            todo += ins
        yield v, ins


def _reaching_sink(edges: dict[tuple[int, int], int], size: int) -> set[int]:
    """The nodes from which more could still flow to the sink, at the largest flow."""
    if not edges:
        return {_SINK}
    rows, columns = zip(*edges, strict=True)
    capacity = np.array(list(edges.values()), np.int32)
    network = csr_array((capacity, (rows, columns)), shape=(size, size))
    left = network - maximum_flow(network, _SOURCE, _SINK).flow
    left.data = (left.data > 0).astype(np.int32)
    left.eliminate_zeros()
    found = breadth_first_order(left.T.tocsr(), _SINK, return_predecessors=False)
    return set(found.tolist())


def needed(graph: Graph, wanted: Iterable[Any], known: set[Any]) -> list[int]:
    """Positions of the equations that make `wanted` of `known`, in order."""
    todo, found = list(wanted), set()
    while todo:
        v = todo.pop()
        if v not in known and graph.maker[v] not in found:
            found.add(graph.maker[v])
            todo += filter(is_var, graph.eqns[graph.maker[v]].invars)
    return sorted(found)
