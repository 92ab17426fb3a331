"""The optimum of a budget, and how much of it is proven.

First among all sequences (`exhaustive`). If that does not finish, by a mixed-integer
program in each of some orders (`integer_program`), which proves less.
"""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from jaxmem.planning.remat.costs import Cost, costs_of
from jaxmem.planning.remat.exhaustive import search_all
from jaxmem.planning.remat.first_orders import RenumberedGraph
from jaxmem.planning.remat.frontier import Frontier, ParetoFront, Rematerialised
from jaxmem.planning.remat.integer_program import rounded, solve_program
from jaxmem.planning.remat.local_search import RematSearch
from jaxmem.planning.remat.sequence import SequenceTables

EXHAUSTIVE = 0.25  # of the time limit, for the search among all sequences


def proven(
    known: Frontier,  # what the search found; of a graph without aliases
    orders: Sequence[RenumberedGraph],  # of first runs, for the integer program
    budget: float,  # bytes
    cost: Cost,  # of an operation
    time_limit: float,  # seconds
) -> Rematerialised:
    """The cheapest sequence within the budget of those known and the solvers' own."""
    start, graph, front = time.monotonic(), known.graph, ParetoFront()
    until, costs = start + time_limit, costs_of(graph, cost)
    search = RematSearch(SequenceTables(graph), costs, front.add)
    for sequence in known.sequences:
        search.state(sequence)
    if budget < known.lower_bound or front.cost(budget) == 0:
        return known.at(budget)
    complete = _searched_all(search, front, budget, start + time_limit * EXHAUSTIVE)
    in_order = complete
    if not complete:
        task, results = (front, costs, budget), []
        for k, each in enumerate(orders):
            if (now := time.monotonic()) < until:
                left = (until - now) / (len(orders) - k)
                results.append(_solved_in_order(each, *task, left))
        in_order = len(results) == len(orders) and all(results)
    if not np.isfinite(front.cost(budget)):
        raise known.out_of_reach(budget, complete)
    best = dataclasses.replace(
        known,
        **front.columns(),
        seconds=known.seconds + time.monotonic() - start,
    ).at(budget)
    return dataclasses.replace(best, optimal=complete, optimal_in_order=in_order)


def _searched_all(
    search: RematSearch, front: ParetoFront, budget: float, until: float
) -> bool:
    """Searches all sequences; whether the front's cheapest is proven optimal."""
    most = front.cost(budget)
    result = search_all(search.tables, search.cost, budget, most, until=until)
    if result.sequence is not None:
        search.state(result.sequence)
    return result.complete


def _solved_in_order(
    each: RenumberedGraph,
    front: ParetoFront,
    costs: np.ndarray,
    budget: float,
    time_limit: float,
) -> bool:
    """Solves the integer program in one order; whether its result is proven optimal."""
    # The sequences that it finds go to the front.
    tables, order_costs = SequenceTables(each.graph), costs[each.numbers]
    tell = lambda state: front.offer(
        state.peak, state.cost, each.in_graph(state.sequence)
    )
    search = RematSearch(tables, order_costs, tell)
    result = solve_program(tables, order_costs, budget, time_limit, front.cost(budget))
    if result.sequence is not None:
        search.state(result.sequence)
    if not result.proven:
        for sequence in rounded(tables, order_costs, budget, time_limit):
            search.cheapen(search.lower(search.state(sequence), budget), budget)
    return result.proven
