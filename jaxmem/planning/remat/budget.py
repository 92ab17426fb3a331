"""Recomputation under a budget: which operations are repeated, and when.

`frontier` searches once for every budget (`_remat_levels`), in program order and in the
order that `order` finds, if that has the lower peak: the first time that operations are
done follows one of them. The search proves nothing; `rematerialise(..., exact=True)`
does, over all orders for a dozen operations or two (`_remat_exhaustive`), in these
orders for some dozens (`_remat_exact`).
"""

import bisect
import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from jaxmem._checks import check_bool, check_callable, check_float, wrong_type
from jaxmem.planning._graph import Graph, Operation, checked
from jaxmem.planning.remat.bound import least_possible
from jaxmem.planning.remat.first_orders import FirstOrder, RenumberedGraph, first_orders
from jaxmem.planning.remat.levels import ParetoFront, descend
from jaxmem.planning.remat.local_search import RematSearch
from jaxmem.planning.remat.sequence import SequenceTables

ORDERING = 0.25  # of the time limit, to look for an order

Cost = Callable[[Operation], float]


@dataclass(frozen=True)
class Rematerialised:
    """A sequence of operations in which an operation may be recomputed.

    Attributes:
      sequence: numbers of operations in the graph.
      peak: bytes, as `sequence_profile` has them.
      cost: of what is recomputed, in the unit of `cost`; seconds by default.
      recomputed: the operations done more than once, in the order in which that
        happens; one that is done three times is in it twice.
      lower_bound: bytes; no sequence has a smaller peak.
      optimal: whether it is proven that nothing within the budget costs less, in
        whatever order and however often operations are done.
      optimal_in_order: whether it is proven of less: of sequences in which the first
        times follow an order that was tried (see `order` of `frontier`), and where
        between two first times an operation is done once more at most, in that order.
        A cheaper sequence of another kind may exist. True wherever `optimal` is.
      seconds: spent planning.
    """

    sequence: tuple[int, ...]
    peak: int
    cost: float
    recomputed: tuple[int, ...]
    lower_bound: int
    optimal: bool
    optimal_in_order: bool
    seconds: float


class OutOfReach(ValueError):
    """No sequence was found within the budget.

    Attributes:
      least: the smallest peak found, bytes.
      holders: the three largest values at that peak: bytes, and what they are.
      proven: whether there is none; otherwise there may be one that was not found.
    """

    def __init__(
        self,
        budget: float,
        least: int,
        holders: tuple[tuple[int, str], ...],
        proven: bool = False,
    ):
        self.least, self.holders, self.proven = least, holders, proven
        listed = "; ".join(f"{size:,} {what}" for size, what in holders)
        sure = "no sequence stays within" if proven else "none was found within"
        super().__init__(
            f"budget: {sure} {budget:,.0f} bytes; the least peak found is "
            f"{least:,}. Largest there: {listed}"
        )


def seconds(peak_flops: float = 1e15, bandwidth: float = 3.3e12) -> Cost:
    """What an operation takes: by its arithmetic, or by its traffic if that is slower.

    Args:
      peak_flops: operations a second.
      bandwidth: bytes a second. The defaults are about those of an H100.
    """
    peak_flops = check_float("peak_flops", peak_flops, above=0)
    bandwidth = check_float("bandwidth", bandwidth, above=0)
    return lambda o: max(o.flops / peak_flops, o.moved / bandwidth)


@dataclass(frozen=True)
class Frontier:
    """The cheapest sequences found, for every budget.

    Attributes:
      graph: the graph.
      peaks: bytes, rising.
      costs: of each peak's sequence, falling; that of the largest is 0.
      sequences: of each peak, in the numbers of the graph's operations.
      lower_bound: bytes; no sequence has a smaller peak.
      complete: whether the search came to its end before the time limit.
      seconds: spent planning.
    """

    graph: Graph
    peaks: tuple[int, ...]
    costs: tuple[float, ...]
    sequences: tuple[np.ndarray, ...] = field(repr=False)
    lower_bound: int
    complete: bool
    seconds: float

    def at(self, budget: float) -> Rematerialised:
        """The cheapest sequence within a budget.

        Args:
          budget: bytes.

        Raises:
          OutOfReach: nothing that was found is within it.
        """
        k = bisect.bisect_right(self.peaks, budget) - 1
        if k < 0:
            raise self.out_of_reach(budget, budget < self.lower_bound)
        sequence = self.sequences[k]
        repeats = np.delete(sequence, np.unique(sequence, return_index=True)[1])
        return Rematerialised(
            sequence=tuple(sequence.tolist()),
            peak=self.peaks[k],
            cost=self.costs[k],
            recomputed=tuple(repeats.tolist()),
            lower_bound=self.lower_bound,
            optimal=self.costs[k] == 0,
            optimal_in_order=self.costs[k] == 0,
            seconds=self.seconds,
        )

    def out_of_reach(self, budget: float, proven: bool) -> OutOfReach:
        """The error that says that nothing is within a budget.

        Args:
          budget: bytes.
          proven: whether there is nothing, or nothing was found.
        """
        return OutOfReach(budget, self.peaks[0], self._holders(), proven)

    def _holders(self) -> tuple[tuple[int, str], ...]:
        """The largest values at the least peak."""
        events = SequenceTables(self.graph).events(self.sequences[0])
        if not len(events.profile):
            return ()
        peak = int(np.argmax(events.profile))
        same = (events.value[1:] == events.value[:-1]) & ~events.make[1:]
        until = np.append(np.where(same, events.place[1:], -1), -1)
        there = (events.place == peak) | ((events.place < peak) & (until > peak))
        bytes_of = lambda v: self.graph.values[v].bytes
        values = sorted(set(events.value[there].tolist()), key=bytes_of, reverse=True)
        return tuple((bytes_of(v), self._described(v)) for v in values[:3])

    def _described(self, value: int) -> str:
        operation = self.graph.operations[self.graph.maker[value]]
        words = (self.graph.values[value].name, "of", operation.name, operation.path)
        return " ".join(w for w in words if w)


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

    Several budgets for one graph: take `frontier` once, and `.at(budget)`.

    Args:
      graph: the graph. Operations with `recomputable=False`, and those whose output lies in
        the buffer of an argument, are not repeated.
      budget: bytes, arguments not counted (as in `peak`).
      order: as in `frontier`.
      cost: of an operation; `seconds()` by default.
      exact: look for the optimum: among all sequences, which ends for a dozen or two of
        operations; where it does not, by a mixed-integer program in each order that is
        tried, for up to about 40 operations. Graphs without aliases only. What is
        proven is in `optimal` and `optimal_in_order`. Costs are monotone in the budget
        where they are `optimal`; peaks need not be.
      effort: as in `frontier`.
      time_limit: seconds for the search, and as many for the exact one. A search that the
        limit ends gives what it has, which then depends on the machine.
      progress: is called with the part that is done, from 0 to 1.

    Raises:
      OutOfReach: nothing was found within the budget, or there is nothing (`proven`); a
        ValueError.
      ValueError: a negative budget or cost; an `order` that is none; `exact` for a
        graph with aliases.

    Source: Jain et al., "Checkmate" (https://arxiv.org/abs/1910.02653), for the
      problem.
    """
    check_float("budget", budget, at_least=0, infinite=True)
    if check_bool("exact", exact) and checked(graph).aliases:
        raise ValueError("exact: only for graphs without aliases")
    options = _RematOptions.checked(cost, effort, time_limit, progress)
    if not exact:
        return _searched(graph, order, options).at(budget)
    # Here, since scipy.optimize takes longer to import than all of jaxmem.
    from jaxmem.planning.remat.proof import proven

    orders, _ = first_orders(graph, order, options.time_limit * ORDERING)
    found = _frontier(graph, orders, options)
    return proven(found, orders, budget, options.cost, options.time_limit)


def curve(
    graph: Graph, budgets: Iterable[float], **options
) -> list[Rematerialised | None]:
    """`rematerialise` for several budgets in one search; None where out of reach.

    Args:
      graph: the graph.
      budgets: bytes.
      **options: of `frontier`.
    """
    if isinstance(budgets, str) or not isinstance(budgets, Iterable):
        raise wrong_type("budgets", budgets, "a sequence of numbers of bytes")
    budgets = list(budgets)
    for budget in budgets:
        check_float("budgets", budget, at_least=0, infinite=True)
    found = frontier(graph, **options)
    least = found.peaks[0]
    return [found.at(b) if b >= least else None for b in budgets]


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
      order: in which operations are done for the first time. "search": in program order
        and, where `jaxmem.planning.order` finds one with a lower peak, in that one too
        (two searches); every budget takes the better. "program": in the graph's own
        alone. Or every operation once, inputs first.
      cost: of an operation; `seconds()` by default.
      effort: how long to improve in each order, 1 being five to ten seconds; the search
        is deterministic in it.
      time_limit: seconds after which it returns what it has, see `Frontier.complete`.
      progress: is called with the part that is done, from 0 to 1.

    Raises:
      ValueError: a cost that is negative or not finite; an `order` that is none.
    """
    options = _RematOptions.checked(cost, effort, time_limit, progress)
    return _searched(graph, order, options)


@dataclass(frozen=True)
class _RematOptions:
    """How to search."""

    cost: Cost
    effort: float
    time_limit: float
    progress: Callable[[float], None] | None

    @classmethod
    def checked(cls, cost, effort, time_limit, progress) -> "_RematOptions":
        """The options as the caller gave them; errors name them."""
        for name, given in (("cost", cost), ("progress", progress)):
            if given is not None:
                check_callable(name, given, "a function, or None")
        return cls(
            seconds() if cost is None else cost,
            check_float("effort", effort, at_least=0),
            check_float("time_limit", time_limit, at_least=0, infinite=True),
            progress,
        )


def _searched(graph: Graph, order: FirstOrder, options: _RematOptions) -> Frontier:
    """The frontier, with the time for an order in the limit."""
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
    """The cheapest sequences whose first times follow one of the orders."""
    start, bound, complete = time.monotonic(), least_possible(graph), True
    costs, merged = costs_of(graph, options.cost), ParetoFront()
    until = start + options.time_limit
    for k, each in enumerate(orders):
        now = time.monotonic()
        deadline = now + (until - now) / (len(orders) - k)
        family = ParetoFront()
        tables, mine = SequenceTables(each.graph), costs[each.numbers]
        search = RematSearch(tables, mine, family.add, deadline)
        plain = search.state(np.arange(len(graph.operations)))
        if merged.cost(bound) > 0 and plain.peak > bound:
            progress = options.progress
            tell = progress and partial(_part, progress, k, len(orders))
            descend(search, family, plain, bound, options.effort, tell)
        complete &= not search.late()
        for peak, price, found in family:
            merged.offer(peak, price, each.told(found))
    return Frontier(
        graph,
        tuple(merged.peaks),
        tuple(cost for cost, _ in merged.prices),
        tuple(merged.sequences),
        bound,
        complete,
        time.monotonic() - start,
    )


def _part(progress: Callable[[float], None], k: int, count: int, part: float) -> None:
    progress((k + part) / count)


def costs_of(graph: Graph, cost: Cost) -> np.ndarray:
    """What each operation costs.

    Raises:
      ValueError: one is negative or not finite.
    """
    costs = np.array([cost(o) for o in graph.operations], dtype=np.float64)
    bad = np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))
    if len(bad):
        name = graph.operations[bad[0]].name
        raise ValueError(
            f"cost: must be finite and at least 0; got {costs[bad[0]]} for "
            f"operations[{bad[0]}] ({name})"
        )
    return costs
