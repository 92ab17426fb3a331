"""The orders in which operations run for the first time, where some are recomputed.

The searches number operations in that order. A graph is therefore renumbered before
they see it, and their sequences are translated back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from jaxmem._checks import wrong_value
from jaxmem.planning._graph import Graph
from jaxmem.planning._live_ranges import peak
from jaxmem.planning.order.search import order as best_order

FirstOrder = Literal["search", "program"] | Sequence[int]


@dataclass(frozen=True)
class RenumberedGraph:
    """A graph whose operations are numbered in the order of their first runs."""

    graph: Graph
    numbers: np.ndarray  # (operations,) their numbers in the graph of the caller

    def in_graph(self, sequence: np.ndarray) -> np.ndarray:
        """A sequence in the numbers of the caller's graph."""
        return self.numbers[sequence]


def first_orders(
    graph: Graph, order: FirstOrder, time_limit: float
) -> tuple[list[RenumberedGraph], bool]:
    """The orders to search in, the lowest peak first; whether the limit sufficed."""
    program = tuple(range(len(graph.operations)))
    if isinstance(order, str):
        if order not in ("search", "program"):
            allowed = "'search', 'program' or every operation once"
            raise wrong_value("order", order, allowed)
        orders, complete = [program], order == "program"
        if order == "search" and time_limit > 0:
            found = best_order(graph, time_limit=time_limit)
            complete = found.seconds < time_limit
            if found.peak < peak(graph):
                orders.insert(0, found.operations)
    else:
        orders, complete = [graph.check_order(order)], True
    return [_renumbered_graph(graph, o) for o in orders], complete


def _renumbered_graph(graph: Graph, order: tuple[int, ...]) -> RenumberedGraph:
    operations = tuple(graph.operations[i] for i in order)
    renumbered = replace(graph, operations=operations)
    return RenumberedGraph(renumbered, np.array(order, np.int64))
