"""The order in which a graph is done, chosen for the fewest bytes at the peak.

The graph is split where every order passes; the parts are taken from the worst on,
until the worst one left cannot be improved or need not be. Small parts are solved
exactly. Large ones start from every greedy order and are swept (updates of weights go
where they lower the peak, at once or later); then their worst stretches are solved.

Not optimal for large parts; how far from it at most, the bound says. Only values put
operations in order: side effects must be values too.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jaxmem._checks import check_callable, check_float
from jaxmem.planning._graph import Graph, checked
from jaxmem.planning._live_ranges import LiveWalk, OrderProblem, order_problem
from jaxmem.planning._lower_bound import PeakBounds
from jaxmem.planning.order import exact
from jaxmem.planning.order.cache import SolutionCache
from jaxmem.planning.order.exact import SolvedOrder
from jaxmem.planning.order.greedy import GREEDY
from jaxmem.planning.order.segments import segments
from jaxmem.planning.order.sweep import swept
from jaxmem.planning.order.windows import improved

CUTS = 16  # operations for which a minimum cut is found
SMALL = 64  # operations: up to so many are solved exactly whatever it takes
MEDIUM = 160  # operations: up to so many a beam is tried on the whole
ROUNDS = 8  # in which a large part is made better

Progress = Callable[[float, int], None]


@dataclass(frozen=True)
class Order:
    """An order of a graph's operations.

    Attributes:
      operations: every operation once, inputs first.
      peak: the most bytes alive while one runs; arguments are not counted.
      lower_bound: bytes that every order has alive at some time (proven).
      segments: into how many parts the graph falls that are ordered alone.
      exact: of those, how many have an order that is proven to be good enough: their
        own optimum, or no more than the whole cannot do without.
      searched: how many of them have one that a search found, with nothing proven.
      seconds: what the search took.
    """

    operations: tuple[int, ...]
    peak: int
    lower_bound: int
    segments: int
    exact: int
    searched: int
    seconds: float

    @property
    def optimal(self) -> bool:
        """Whether no order has a lower peak, proven."""
        return self.peak == self.lower_bound

    @property
    def gap(self) -> float:
        """How far the peak is above the bound, as a fraction of the bound."""
        return self.peak / self.lower_bound - 1 if self.lower_bound else 0.0


@dataclass
class _Segment:
    """A segment: where it lies, its problem, and what is known of its order."""

    place: range
    problem: OrderProblem
    starts: list[tuple[int, ...]]
    best: SolvedOrder


def order(
    graph: Graph, *, time_limit: float = 60.0, progress: Progress | None = None
) -> Order:
    """The order with the lowest peak that is found.

    Args:
      graph: the graph. Up to 64 operations (and any whose segments are no larger) are
        solved to proven optimality, unless time runs out: 40 take seconds at most in
        random graphs, 60 half a minute.
      time_limit: seconds after which the best so far is given back. A single step of
        the search, a few seconds at most on ten thousand operations, is not cut short.
      progress: called with the fraction of segments that are decided, and the peak.

    Returns:
      `Order`: never worse than program order or than any order of `GREEDY`. The same
      graph has the same order, unless time runs out.

    Raises:
      ValueError: `time_limit` is not above 0.

    Source: ROAM (arXiv:2310.19295) for segments and the placement of updates; Serenity
    (MLSys 2020) for the search over sets of operations.
    """
    checked(graph)
    time_limit = check_float("time_limit", time_limit, above=0, infinite=True)
    if progress is not None:
        check_callable("progress", progress, "a function, or None")
    began = time.monotonic()
    until, once = began + time_limit, SolutionCache()
    parts = _parts(graph)
    bound = max((p.best.bound for p in parts), default=0)
    decided: set[int] = set()
    while parts:
        worst = max(range(len(parts)), key=lambda k: parts[k].best.peak)
        if worst in decided or parts[worst].best.peak <= bound:
            break
        part = parts[worst]
        part.best = _solved(part, bound, once, until)
        bound = max(bound, part.best.bound)
        decided.add(worst)
        if progress is not None:
            good = sum(p.best.peak <= bound for p in parts)
            progress(good / len(parts), max(p.best.peak for p in parts))
    for part in parts:
        if time.monotonic() < until:
            part.best = _tidied(part.problem, part.best)
    exact = sum(p.best.peak <= max(bound, p.best.bound) for p in parts)
    return Order(
        operations=tuple(p.place[i] for p in parts for i in p.best.order),
        peak=max((p.best.peak for p in parts), default=0),
        lower_bound=bound,
        segments=len(parts),
        exact=exact,
        searched=len(parts) - exact,
        seconds=time.monotonic() - began,
    )


def _parts(graph: Graph) -> list[_Segment]:
    """The segments, each with the greedy orders of its operations."""
    whole = order_problem(graph)
    starts = [make(graph) for make in GREEDY]
    walk = LiveWalk(whole)
    parts = []
    for place in segments(whole):
        problem = walk.rest(place)
        mine = (start[place.start : place.stop] for start in starts)
        own = dict.fromkeys(tuple(i - place.start for i in order) for order in mine)
        own = sorted(own, key=problem.peak)
        best = SolvedOrder(
            own[0], problem.peak(own[0]), max(problem.base, problem.final)
        )
        parts.append(_Segment(place, problem, own, best))
        for i in place:
            walk.do(i)
    return parts


def _solved(
    part: _Segment, bound: int, once: SolutionCache, until: float
) -> SolvedOrder:
    """A segment's order, as good as `bound` asks for or as it gets."""
    problem, best = part.problem, part.best
    bounds = PeakBounds(problem)
    for cuts in (0, CUTS):
        best = replace(best, bound=max(best.bound, bounds.largest(cuts)))
        if best.peak <= max(bound, best.bound):
            return best
    aim = max(bound, best.bound)
    for start in part.starts:
        if best.peak > aim and time.monotonic() < until:
            best = _better(problem, best, swept(problem, start, aim))
    if len(problem) > SMALL:
        best = _refined(problem, best, aim, once, until)
    if best.peak > aim and len(problem) <= MEDIUM:
        sizes = exact.SIZES[: None if len(problem) <= SMALL else 2]
        found = once.solve(problem, best.order, aim, until, sizes)
        best = replace(best, bound=max(best.bound, found.bound))
        best = _better(problem, best, found.order)
    return best


def _refined(
    problem: OrderProblem,
    best: SolvedOrder,
    aim: int,
    once: SolutionCache,
    until: float,
) -> SolvedOrder:
    """Swept under limits between the aim and the peak, and its worst places solved."""
    for _ in range(ROUNDS):
        before = best.peak
        for share in (1, 2, 4):
            limit = aim + (best.peak - 1 - aim) // share
            if best.peak > aim and time.monotonic() < until:
                best = _better(problem, best, swept(problem, best.order, limit))
        best = _better(problem, best, improved(problem, best.order, aim, once, until))
        if best.peak in (before, aim):
            break
    return best


def _tidied(problem: OrderProblem, best: SolvedOrder) -> SolvedOrder:
    """Updates early and casts late where the peak does not ask for it either.

    That leaves less alive meanwhile, and room for what the graph does not count.
    """
    order = swept(problem, best.order, best.peak)
    peak = problem.peak(order)
    return replace(best, order=order, peak=peak) if peak <= best.peak else best


def _better(
    problem: OrderProblem, best: SolvedOrder, order: Sequence[int]
) -> SolvedOrder:
    peak = problem.peak(order)
    return replace(best, order=tuple(order), peak=peak) if peak < best.peak else best
