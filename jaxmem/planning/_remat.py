"""Recomputation under a budget: which operations are done again, and when.

`frontier` searches once for every budget: from keeping everything down to the least it
reaches, in steps that depend on the graph alone, by chain plans (`_remat_chain`) and
small steps from them (`_remat_search`). Every sequence it meets that is cheaper than
all of at most its peak is kept, and a budget takes the cheapest within it. So the
answers are monotone: a smaller budget never has the larger peak, nor the lower cost.

Operations are done for the first time in the graph's own order: order it before. The
search proves nothing; `rematerialise(..., exact=True)` does, for graphs of some dozens
of operations (`_remat_exact`).
"""

import bisect
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from jaxmem._checks import check_bool, check_callable, check_float, wrong_type
from jaxmem.planning._graph import Graph, Operation, checked
from jaxmem.planning._remat_chain import chain_plans
from jaxmem.planning._remat_search import Search, State
from jaxmem.planning._remat_sequence import Tables

LEVELS = 40  # peaks aimed at
LONGEST = 2  # times the operations: longer sequences are not lowered further
WORK = 500.0  # to lower a sequence to the next peak
TRIES = 6  # to improve what is between two peaks
SLACK = 1.2  # what costs this times what is known already is given up
EFFORT = 20_000.0  # of work, quarters of a millisecond or so; chain plans on top

Cost = Callable[[Operation], float]


@dataclass(frozen=True)
class Rematerialised:
    """A sequence of operations in which an operation may come again.

    Attributes:
      sequence: numbers of operations; for the first time each comes in program order.
      peak: bytes, as `sequence_profile` has them.
      cost: of what is done again, in the unit of `cost`; seconds by default.
      recomputed: the operations done again, in the order in which that happens; one
        that is done three times is in it twice.
      lower_bound: bytes; no sequence has a smaller peak.
      optimal: whether nothing within the budget costs less (among the sequences that
        the exact search knows, where something is done again).
      seconds: spent planning.
    """

    sequence: tuple[int, ...]
    peak: int
    cost: float
    recomputed: tuple[int, ...]
    lower_bound: int
    optimal: bool
    seconds: float


class OutOfReach(ValueError):
    """No sequence was found within the budget.

    Attributes:
      least: the smallest peak found, bytes.
      holders: the three largest values at that peak: bytes, and what they are.
    """

    def __init__(self, budget: float, least: int, holders: tuple[tuple[int, str], ...]):
        self.least, self.holders = least, holders
        listed = "; ".join(f"{size:,} {what}" for size, what in holders)
        super().__init__(
            f"budget: {budget:,.0f} bytes are not reached; the least peak found is "
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
      sequences: of each peak.
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
            raise OutOfReach(budget, self.peaks[0], self._holders())
        sequence = self.sequences[k]
        again = np.delete(sequence, np.unique(sequence, return_index=True)[1])
        return Rematerialised(
            tuple(sequence.tolist()),
            self.peaks[k],
            self.costs[k],
            tuple(again.tolist()),
            self.lower_bound,
            self.costs[k] == 0,
            self.seconds,
        )

    def _holders(self) -> tuple[tuple[int, str], ...]:
        """The largest values at the least peak."""
        events = Tables(self.graph).events(self.sequences[0])
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
    cost: Cost | None = None,
    exact: bool = False,
    effort: float = 1.0,
    time_limit: float = 60.0,
    progress: Callable[[float], None] | None = None,
) -> Rematerialised:
    """The cheapest sequence with repeats that stays within a budget.

    Several budgets for one graph: take `frontier` once, and `.at(budget)`.

    Args:
      graph: the graph. Operations with `again=False`, and those whose output lies in
        the buffer of an argument, are not repeated.
      budget: bytes, arguments not counted (as in `peak`).
      cost: of an operation; `seconds()` by default.
      exact: solve the mixed-integer program too: graphs of up to about 40 operations,
        without aliases. Its costs are monotone where they are `optimal`; peaks need not
        be.
      effort: as in `frontier`.
      time_limit: seconds for the search, and again for the exact one. A search that the
        limit ends gives what it has, which then depends on the machine.
      progress: is called with the part that is done, from 0 to 1.

    Raises:
      OutOfReach: the budget is below the least peak found; a ValueError.
      ValueError: a negative budget or cost; `exact` for a graph with aliases.

    Source: Jain et al., "Checkmate" (https://arxiv.org/abs/1910.02653), for the
      problem.
    """
    check_float("budget", budget, at_least=0, infinite=True)
    if check_bool("exact", exact) and checked(graph).aliases:
        raise ValueError("exact: only for graphs without aliases")
    cost = seconds() if cost is None else cost
    found = frontier(
        graph, cost=cost, effort=effort, time_limit=time_limit, progress=progress
    )
    return _exact(found, budget, cost, time_limit) if exact else found.at(budget)


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
    cost: Cost | None = None,
    effort: float = 1.0,
    time_limit: float = 60.0,
    progress: Callable[[float], None] | None = None,
) -> Frontier:
    """The cheapest sequences found for every budget, from one search.

    Args:
      graph: the graph.
      cost: of an operation; `seconds()` by default.
      effort: how long to improve, 1 being about five seconds; the search is
        deterministic in it.
      time_limit: seconds after which it returns what it has, see `Frontier.complete`.
      progress: is called with the part that is done, from 0 to 1.

    Raises:
      ValueError: a cost that is negative or not finite.
    """
    start = time.monotonic()
    effort = check_float("effort", effort, at_least=0)
    time_limit = check_float("time_limit", time_limit, at_least=0, infinite=True)
    for name, given in (("cost", cost), ("progress", progress)):
        if given is not None:
            check_callable(name, given, "a function, or None")
    costs = _costs(checked(graph), seconds() if cost is None else cost)
    tables, family = Tables(graph), _Family()
    search = Search(tables, costs, family.add, start + time_limit)
    plain = search.state(np.arange(len(graph.operations)))
    bound = least_possible(graph)
    if plain.cost == 0 and plain.peak > bound:
        _descend(search, family, plain, bound, effort * EFFORT, progress)
    complete = not search.late()
    return family.frontier(graph, bound, complete, time.monotonic() - start)


def _descend(
    search: Search, family: "_Family", plain: State, bound: int, effort: float, progress
) -> None:
    """Fills the family: from the plain peak down to the bound, and up again."""
    for sequence in chain_plans(search.tables, search.cost, plain.events):
        if search.late():
            return
        search.state(sequence)
    targets = np.geomspace(plain.peak, max(bound, 1), LEVELS)[1:]
    before, missed, reached = plain.sequence, 0, []
    refined: Counter[tuple[float, float]] = Counter()
    begin = search.work

    def visit(target: float, part: float) -> np.ndarray | None:
        best = _level(search, family, target, before)
        if best is not None:
            # Up to the next sequence's peak this one is the best.
            name = target, cost = family.step(target)
            if refined[name] < TRIES and cost > 0:
                left = begin + effort * part - search.work
                search.refine(search.state(best), target, left, refined[name])
                refined[name] += 1
        if progress is not None:
            progress(part)
        return family.nearest(target)[1]

    for step, target in enumerate(targets):
        best = visit(target, (step + 1) / (2 * LEVELS))
        if best is None:
            missed += 1
            if missed == 3 or search.late():
                break
            continue
        before = best
        reached.append(target)
    for step, target in enumerate(reversed(reached)):
        if search.work < begin + effort:
            visit(target, 0.5 + (step + 1) / (2 * len(reached)))
    if progress is not None:
        progress(1.0)


def _level(search: Search, family, target: float, before) -> np.ndarray | None:
    """The cheapest sequence within the target, from those around and `before`."""
    above, below = family.nearest(target)
    if below is not None:
        search.cheapen(search.state(below), target)
    count = len(search.cost)
    longest, work = max(LONGEST * count, 1500), WORK + count / 8
    for sequence in [above] if above is before else [above, before]:
        if sequence is None or len(sequence) > longest:
            continue
        known = family.cost(target)
        most = SLACK * known
        lowered = search.lower(search.state(sequence), target, longest, most, work)
        if lowered.peak <= target:
            search.cheapen(lowered, target)
    return family.nearest(target)[1]


class _Family:
    """The cheapest sequences met, by rising peak; of equal costs the shorter."""

    def __init__(self):
        self.peaks: list[int] = []
        self._prices: list[tuple[float, int]] = []
        self.sequences: list[np.ndarray] = []

    def add(self, state: State) -> None:
        price = (state.cost, len(state.sequence))
        at = bisect.bisect_right(self.peaks, state.peak)
        if at and self._prices[at - 1] <= price:
            return
        start = stop = bisect.bisect_left(self.peaks, state.peak)
        while stop < len(self.peaks) and self._prices[stop] >= price:
            stop += 1
        self.peaks[start:stop] = [state.peak]
        self._prices[start:stop] = [price]
        self.sequences[start:stop] = [state.sequence]

    def cost(self, target: float) -> float:
        """Of the cheapest sequence within the target; infinite if there is none."""
        k = bisect.bisect_right(self.peaks, target)
        return self._prices[k - 1][0] if k else math.inf

    def step(self, target: float) -> tuple[float, float]:
        """Up to where the cheapest within the target is the cheapest, and its cost."""
        k = bisect.bisect_right(self.peaks, target)
        end = self.peaks[k] - 1 if k < len(self.peaks) else target
        return end, self._prices[k - 1][0]

    def nearest(self, target: float) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The sequences with the next larger peak than the target, and at most it."""
        k = bisect.bisect_right(self.peaks, target)
        above = self.sequences[k] if k < len(self.peaks) else None
        return above, self.sequences[k - 1] if k else None

    def frontier(self, graph: Graph, bound: int, complete: bool, seconds: float):
        return Frontier(
            graph,
            tuple(self.peaks),
            tuple(cost for cost, _ in self._prices),
            tuple(self.sequences),
            bound,
            complete,
            seconds,
        )


def _exact(found: Frontier, budget: float, cost: Cost, time_limit: float):
    """The cheapest within the budget of what was found and what the solver finds."""
    # Here, since scipy.optimize takes longer to import than all of jaxmem.
    from jaxmem.planning._remat_exact import rounded, solve

    start, graph = time.monotonic(), found.graph
    tables, costs, family = Tables(graph), _costs(graph, cost), _Family()
    search = Search(tables, costs, family.add)
    for sequence in found.sequences:
        search.state(sequence)
    result = solve(tables, costs, budget, time_limit, family.cost(budget))
    if result.sequence is not None:
        search.state(result.sequence)
    if not result.proven:
        for sequence in rounded(tables, costs, budget, time_limit):
            search.cheapen(search.lower(search.state(sequence), budget), budget)
    spent = found.seconds + time.monotonic() - start
    merged = family.frontier(graph, found.lower_bound, found.complete, spent)
    return dataclasses.replace(merged.at(budget), optimal=result.proven)


def _costs(graph: Graph, cost: Cost) -> np.ndarray:
    costs = np.array([cost(o) for o in graph.operations], dtype=np.float64)
    bad = np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))
    if len(bad):
        name = graph.operations[bad[0]].name
        raise ValueError(
            f"cost: must be finite and at least 0; got {costs[bad[0]]} for "
            f"operations[{bad[0]}] ({name})"
        )
    return costs


def least_possible(graph: Graph) -> int:
    """Bytes that no sequence stays below, in whatever order and however often.

    The most that an operation takes while it runs, with what it reads and makes alone;
    and the outputs at the end.
    """
    tables = Tables(graph)
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
