"""Bytes that no sequence stays below, in whatever order and however often."""

from jaxmem.planning._graph import Graph
from jaxmem.planning.remat.sequence import SequenceTables


def least_possible(graph: Graph) -> int:
    """The most that an operation takes while it runs, and the outputs at the end.

    An operation by itself: what it reads and makes, and its scratch.
    """
    tables = SequenceTables(graph)
    most = tables.size[tables.held].sum()
    for i, operation in enumerate(graph.operations):
        there = tables.size[[*tables.reads[i], *tables.makes[i]]].sum()
        over = sum(
            max(
                (tables.size[[v, u]].min() for w, u in operation.in_place if w == v),
                default=0.0,
            )
            for v in tables.makes[i]
        )
        most = max(most, there - over + operation.scratch)
    return int(most)
