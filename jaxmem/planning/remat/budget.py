"""Recomputation under a budget: which operations to repeat, and when.

`frontier` searches once for every budget (`levels`) and proves nothing. `rematerialise`
with `exact=True` does (`proof`): over all orders for a dozen operations or two
(`exhaustive`), in the orders of first runs for some dozens (`integer_program`).
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxmem._checks import check_bool, check_callable, check_float
from jaxmem.planning._graph import Graph, checked
from jaxmem.planning.remat.costs import Cost, costs_of, seconds
from jaxmem.planning.remat.first_orders import FirstOrder, RenumberedGraph, first_orders
from jaxmem.planning.remat.frontier import Frontier, ParetoFront, Rematerialised
from jaxmem.planning.remat.levels import descend
from jaxmem.planning.remat.local_search import RematSearch
from jaxmem.planning.remat.sequence import SequenceTables, least_possible

ORDERING = 0.25  # of the time limit, to search for an order


def rematerialise(
    graph: Graph,
    budget: float,
    *,
    order: FirstOrder = "search",
    cost: Cost | None = None,
    exact: bool = False,
    effort: float = 1.0,
    time_limit: float = 60.0,
    progress: Callable[[float], None] | None = None,
) -> Rematerialised:
    """The cheapest sequence with repeats that stays within a budget.

    For several budgets of one graph call `frontier` once, and `.at(budget)`.

    Args:
      graph: the graph. Operations with `recomputable=False`, and those whose output
        takes over the buffer of an argument, are not repeated.
      budget: bytes, arguments not counted (as in `peak`).
      order: as in `frontier`.
      cost: of an operation; `seconds()` by default.
      exact: search for the optimum: first among all sequences, which finishes for a
        dozen or two of operations; otherwise by a mixed-integer program in each order
        that is tried, for up to about 40 operations. Only for graphs without aliases.
        `optimal` and `optimal_in_order` say what is proven. Costs are monotone in the
        budget where they are `optimal`; peaks need not be.
      effort: as in `frontier`.
      time_limit: seconds for the search, and as many for the exact one. The result of
        a search that the limit ends depends on the machine.
      progress: called with the fraction that is done, from 0 to 1.

    Raises:
      OutOfReach: no sequence within the budget was found, or there is none (`proven`);
        a ValueError.
      ValueError: the budget or a cost is negative; `order` is invalid; `exact` for a
        graph with aliases.

    Source: Jain et al., "Checkmate" (https://arxiv.org/abs/1910.02653), for the
      problem.

    Example::

      closed = jax.make_jaxpr(step)(state, batch)
      graph = jaxmem.scheduling.operations_of(closed).graph
      peak = jaxmem.planning.peak(graph)
      plan = jaxmem.planning.rematerialise(graph, budget=peak, effort=0.1)
    """
    check_float("budget", budget, at_least=0, infinite=True)
    if check_bool("exact", exact) and checked(graph).aliases:
        raise ValueError("exact: only for graphs without aliases")
    options = _RematOptions.checked(cost, effort, time_limit, progress)
    if not exact:
        return _searched(graph, order, options).at(budget)
    # Imported here, since scipy.optimize takes longer to import than all of jaxmem.
    from jaxmem.planning.remat.proof import proven

    orders, _ = first_orders(graph, order, options.time_limit * ORDERING)
    found = _frontier(graph, orders, options)
    return proven(found, orders, budget, options.cost, options.time_limit)


def frontier(
    graph: Graph,
    *,
    order: FirstOrder = "search",
    cost: Cost | None = None,
    effort: float = 1.0,
    time_limit: float = 60.0,
    progress: Callable[[float], None] | None = None,
) -> Frontier:
    """The cheapest sequences found for every budget, from one search.

    Args:
      graph: the graph.
      order: the order of the operations' first runs. "search" tries program order and,
        if `jaxmem.planning.order` finds one with a lower peak, that one too (two
        searches); every budget takes the better. "program" tries only the graph's own
        order. Otherwise, every operation once, inputs first.
      cost: of an operation; `seconds()` by default.
      effort: how long to improve in each order, 1 being five to ten seconds; the search
        is deterministic in it.
      time_limit: seconds after which it returns what it has, see `Frontier.complete`.
      progress: called with the fraction that is done, from 0 to 1.

    Raises:
      ValueError: a cost is negative or not finite, or `order` is invalid.

    Example::

      closed = jax.make_jaxpr(step)(state, batch)
      graph = jaxmem.scheduling.operations_of(closed).graph
      front = jaxmem.planning.frontier(graph, effort=0.1)
    """
    options = _RematOptions.checked(cost, effort, time_limit, progress)
    return _searched(graph, order, options)


@dataclass(frozen=True)
class _RematOptions:
    """The options that `rematerialise` and `frontier` share."""

    cost: Cost
    effort: float
    time_limit: float
    progress: Callable[[float], object]

    @classmethod
    def checked(cls, cost, effort, time_limit, progress) -> "_RematOptions":
        """The options of the caller, checked."""
        for name, given in (("cost", cost), ("progress", progress)):
            if given is not None:
                check_callable(name, given, "a function, or None")
        return cls(
            seconds() if cost is None else cost,
            check_float("effort", effort, at_least=0),
            check_float("time_limit", time_limit, at_least=0, infinite=True),
            progress or (lambda fraction: None),
        )


def _searched(graph: Graph, order: FirstOrder, options: _RematOptions) -> Frontier:
    """The frontier; the search for an order counts towards the time limit."""
    start = time.monotonic()
    limit = options.time_limit
    orders, complete = first_orders(checked(graph), order, limit * ORDERING)
    left = limit - (time.monotonic() - start)
    found = _frontier(graph, orders, dataclasses.replace(options, time_limit=left))
    return dataclasses.replace(
        found,
        complete=found.complete and complete,
        seconds=time.monotonic() - start,
    )


def _frontier(
    graph: Graph, orders: list[RenumberedGraph], options: _RematOptions
) -> Frontier:
    """The cheapest sequences whose first runs follow one of the orders."""
    start, bound, complete = time.monotonic(), least_possible(graph), True
    costs, merged = costs_of(graph, options.cost), ParetoFront()
    until = start + options.time_limit
    for k, each in enumerate(orders):
        now = time.monotonic()
        deadline = now + (until - now) / (len(orders) - k)
        front = ParetoFront()
        tables, order_costs = SequenceTables(each.graph), costs[each.numbers]
        search = RematSearch(tables, order_costs, front.add, deadline)
        plain = search.state(np.arange(len(graph.operations)))
        if merged.cost(bound) > 0 and plain.peak > bound:
            tell = lambda f, k=k: options.progress((k + f) / len(orders))
            descend(search, front, plain, bound, options.effort, tell)
        complete &= not search.late()
        for peak, price, found in front:
            merged.offer(peak, price, each.in_graph(found))
    return Frontier(
        graph,
        **merged.columns(),
        lower_bound=bound,
        complete=complete,
        seconds=time.monotonic() - start,
    )
