"""A small peak that some sequence with repeats has, found soon."""

import numpy as np

from jaxmem.planning._graph import Graph
from jaxmem.planning.remat.chain import least_chain_plans
from jaxmem.planning.remat.costs import Cost, costs_of
from jaxmem.planning.remat.sequence import SequenceTables


def recomputed_peak(graph: Graph, cost: Cost) -> int:
    """The least peak of a few sequences that recompute; `cost`: of an operation.

    `frontier` looks at thousands of them, and finds less. These depend on the graph
    alone, not on how busy the machine is, and take about a second for a thousand
    operations.
    """
    tables = SequenceTables(graph)
    plain = tables.events(np.arange(len(graph.operations)))
    plans = least_chain_plans(tables, costs_of(graph, cost), plain)
    return min([plain.peak, *(tables.events(plan).peak for plan in plans)])
