"""The optimum of a budget, and how much of it is proven.

First among all sequences (`_remat_exhaustive`); where that does not end, by a
mixed-integer program in each of some orders (`_remat_exact`), which proves less.
"""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from jaxmem.planning.remat.budget import Cost, Frontier, Rematerialised, costs_of
from jaxmem.planning.remat.exhaustive import search_all
from jaxmem.planning.remat.first_orders import RenumberedGraph
from jaxmem.planning.remat.integer_program import rounded, solve
from jaxmem.planning.remat.levels import ParetoFront
from jaxmem.planning.remat.local_search import RematSearch
from jaxmem.planning.remat.sequence import SequenceTables

EVERYWHERE = 0.25  # of the time limit, for the search among all sequences


def proven(
    found: Frontier,
    orders: Sequence[RenumberedGraph],
    budget: float,
    cost: Cost,
    time_limit: float,
) -> Rematerialised:
    """The cheapest within the budget of what was found and what the solvers find.

    Args:
      found: what the search found; of a graph without aliases.
      orders: of first times, for the program.
      budget: bytes.
      cost: of an operation.
      time_limit: seconds.

    Raises:
      OutOfReach: nothing was found within the budget, or there is nothing.
    """
    start, graph, family = time.monotonic(), found.graph, ParetoFront()
    until, costs = start + time_limit, costs_of(graph, cost)
    search = RematSearch(SequenceTables(graph), costs, family.add)
    for sequence in found.sequences:
        search.state(sequence)
    if budget < found.lower_bound or family.cost(budget) == 0:
        return found.at(budget)
    part = start + time_limit * EVERYWHERE
    known = family.cost(budget)
    everywhere = search_all(search.tables, costs, budget, known, until=part)
    if everywhere.sequence is not None:
        search.state(everywhere.sequence)
    in_order = everywhere.complete
    if not everywhere.complete:
        results = [
            _in_order(each, family, costs, budget, (until - now) / (len(orders) - k))
            for k, each in enumerate(orders)
            if (now := time.monotonic()) < until
        ]
        in_order = len(results) == len(orders) and all(results)
    if not np.isfinite(family.cost(budget)):
        raise found.out_of_reach(budget, everywhere.complete)
    spent = found.seconds + time.monotonic() - start
    best = dataclasses.replace(
        found,
        peaks=tuple(family.peaks),
        costs=tuple(price for price, _ in family.prices),
        sequences=tuple(family.sequences),
        seconds=spent,
    ).at(budget)
    return dataclasses.replace(
        best, optimal=everywhere.complete, optimal_in_order=in_order
    )


def _in_order(
    each: RenumberedGraph,
    family: ParetoFront,
    costs: np.ndarray,
    budget: float,
    time_limit: float,
) -> bool:
    """Solves the program in one order; whether nothing of its kind is cheaper.

    What it finds goes to the family.
    """
    tables, mine = SequenceTables(each.graph), costs[each.numbers]
    tell = lambda state: family.offer(state.peak, state.cost, each.told(state.sequence))
    search = RematSearch(tables, mine, tell)
    result = solve(tables, mine, budget, time_limit, family.cost(budget))
    if result.sequence is not None:
        search.state(result.sequence)
    if not result.proven:
        for sequence in rounded(tables, mine, budget, time_limit):
            search.cheapen(search.lower(search.state(sequence), budget), budget)
    return result.proven
