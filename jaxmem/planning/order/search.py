"""The order of a graph's operations with the fewest bytes at the peak.

Small segments are solved exactly (`exact`). Large ones start from every greedy order
(`greedy`) and are swept (`sweep`); then their worst stretches are solved (`windows`).
Only values constrain the order, so side effects must be values too.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jaxmem._checks import check_callable, check_float
from jaxmem.planning._graph import Graph, checked
from jaxmem.planning._live_ranges import LiveWalk, OrderProblem, order_problem
from jaxmem.planning._lower_bound import PeakBounds
from jaxmem.planning.order.exact import SIZES, SolutionCache, SolvedOrder
from jaxmem.planning.order.greedy import GREEDY
from jaxmem.planning.order.sweep import swept
from jaxmem.planning.order.windows import improved

CUTS = 16  # operations for which a minimum cut is solved
SMALL = 64  # operations of a segment up to which it is solved exactly
MEDIUM = 160  # operations of a segment up to which a beam is tried on the whole
ROUNDS = 8  # of improvement of a large segment

Progress = Callable[[float, int], None]


@dataclass(frozen=True)
class Order:
    """An order of a graph's operations.

    Attributes:
      operations: every operation once, inputs first.
      peak: the most bytes alive while one runs; arguments are not counted.
      lower_bound: bytes that every order has alive at some time (proven).
      segments: the number of segments, which are ordered separately.
      exact: the number of segments whose order is proven to be good enough: it is their
        own optimum, or takes no more than `lower_bound`.
      searched: the number of the other segments, of which nothing is proven.
      seconds: the duration of the search.
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
    """A segment: its operations, its problem, and what is known of its order."""

    place: range
    problem: OrderProblem
    starts: list[tuple[int, ...]]
    best: SolvedOrder


def order(
    graph: Graph, *, time_limit: float = 60.0, progress: Progress | None = None
) -> Order:
    """Finds an order with a low peak.

    Args:
      graph: the graph. Graphs whose segments have up to 64 operations are solved to
        proven optimality, unless time runs out: random graphs of 40 operations take
        seconds at most, of 60 half a minute.
      time_limit: seconds after which the best order so far is returned. A single step
        of the search, a few seconds at most on ten thousand operations, is not cut
        short.
      progress: called with the fraction of segments that are decided, and the peak in
        bytes.

    Returns:
      `Order`: never worse than program order or any order of `GREEDY`. The same graph
      gives the same order, unless time runs out.

    Raises:
      ValueError: `time_limit` is not above 0.

    Source: ROAM (arXiv:2310.19295) for segments and the placement of updates; Serenity
    (MLSys 2020) for the search over sets of operations.

    Example::

      closed = jax.make_jaxpr(step)(state, batch)
      graph = jaxmem.scheduling.operations_of(closed).graph
      print(jaxmem.planning.order(graph).peak)
    """
    checked(graph)
    time_limit = check_float("time_limit", time_limit, above=0, infinite=True)
    if progress is not None:
        check_callable("progress", progress, "a function, or None")
    began = time.monotonic()
    until = began + time_limit
    segments = _segments(graph)
    bound = _improve_worst(segments, until, progress)
    for segment in segments:
        if time.monotonic() < until:
            segment.best = _tidied(segment.problem, segment.best)
    exact = sum(s.best.peak <= max(bound, s.best.bound) for s in segments)
    return Order(
        operations=tuple(s.place[i] for s in segments for i in s.best.order),
        peak=max((s.best.peak for s in segments), default=0),
        lower_bound=bound,
        segments=len(segments),
        exact=exact,
        searched=len(segments) - exact,
        seconds=time.monotonic() - began,
    )


def _improve_worst(
    segments: list[_Segment], until: float, progress: Progress | None
) -> int:
    """Improves the segment with the highest peak until that is decided; the bound."""
    # The peak is the largest of the segments' peaks: only the worst ones matter.
    bound, cache = max((s.best.bound for s in segments), default=0), SolutionCache()
    decided: set[int] = set()
    while segments:
        worst = max(range(len(segments)), key=lambda k: segments[k].best.peak)
        segment = segments[worst]
        if worst in decided or segment.best.peak <= bound:
            break
        segment.best = _solved(segment, bound, cache, until)
        bound = max(bound, segment.best.bound)
        decided.add(worst)
        if progress is not None:
            good = sum(s.best.peak <= bound for s in segments)
            progress(good / len(segments), max(s.best.peak for s in segments))
    return bound


def _segments(graph: Graph) -> list[_Segment]:
    """The segments, each with the greedy orders of its operations."""
    whole = order_problem(graph)
    starts = [make(graph) for make in GREEDY]
    walk = LiveWalk(whole)
    found = []
    for place in segment_ranges(whole):
        problem = walk.rest(place)
        mine = (start[place.start : place.stop] for start in starts)
        orders = dict.fromkeys(tuple(i - place.start for i in o) for o in mine)
        orders = sorted(orders, key=problem.peak)
        best = SolvedOrder(
            orders[0], problem.peak(orders[0]), max(problem.base, problem.final)
        )
        found.append(_Segment(place, problem, orders, best))
        for i in place:
            walk.do(i)
    return found


def segment_ranges(problem: OrderProblem) -> list[range]:
    """Ranges of operations that every order runs one after another."""
    # An operation that must run after all those before it and before all those after it
    # is a memory-insensitive point: what is alive there is the same in every order.
    after_all = _dominating(problem.before, range(len(problem)))
    before_all = _dominating(problem.after, range(len(problem) - 1, -1, -1))
    points = sorted(i + 1 for i in after_all & before_all)
    starts = [0, *points]
    stops = [*points, len(problem)]
    return [range(a, b) for a, b in zip(starts, stops, strict=True) if a < b]


def _dominating(before: Sequence[tuple[int, ...]], order: Sequence[int]) -> set[int]:
    """Operations that need all those which precede them in this order."""
    dominating: set[int] = set()
    unread: set[int] = set()  # they have run, and nothing that ran since needs them
    for i in order:
        unread.difference_update(before[i])
        unread.add(i)
        if len(unread) == 1:
            dominating.add(i)
    return dominating


def _solved(
    segment: _Segment, bound: int, cache: SolutionCache, until: float
) -> SolvedOrder:
    """A segment's order, as good as `bound` asks for or as it gets."""
    problem, best = segment.problem, segment.best
    bounds = PeakBounds(problem)
    for cuts in (0, CUTS):
        best = replace(best, bound=max(best.bound, bounds.largest(cuts)))
        if best.peak <= max(bound, best.bound):
            return best
    aim = max(bound, best.bound)
    for start in segment.starts:
        if best.peak > aim and time.monotonic() < until:
            best = _better(problem, best, swept(problem, start, aim))
    if len(problem) > SMALL:
        best = _refined(problem, best, aim, cache, until)
    if best.peak > aim and len(problem) <= MEDIUM:
        sizes = SIZES if len(problem) <= SMALL else SIZES[:2]
        solved = cache.solve(problem, best.order, aim, until, sizes)
        best = replace(best, bound=max(best.bound, solved.bound))
        best = _better(problem, best, solved.order)
    return best


def _refined(
    problem: OrderProblem, best: SolvedOrder, aim: int, cache: SolutionCache, until
) -> SolvedOrder:
    """The order swept under several limits, and its worst stretches solved."""
    for _ in range(ROUNDS):
        before = best.peak
        for share in (1, 2, 4):
            limit = aim + (best.peak - 1 - aim) // share
            if best.peak > aim and time.monotonic() < until:
                best = _better(problem, best, swept(problem, best.order, limit))
        best = _better(problem, best, improved(problem, best.order, aim, cache, until))
        if best.peak in (before, aim):
            break
    return best


def _tidied(problem: OrderProblem, best: SolvedOrder) -> SolvedOrder:
    """The order with updates early and casts late even where the peak does not ask."""
    # That leaves fewer bytes alive between, which is room for what the graph does not
    # count.
    order = swept(problem, best.order, best.peak)
    peak = problem.peak(order)
    return replace(best, order=order, peak=peak) if peak <= best.peak else best


def _better(
    problem: OrderProblem, best: SolvedOrder, order: Sequence[int]
) -> SolvedOrder:
    peak = problem.peak(order)
    return replace(best, order=tuple(order), peak=peak) if peak < best.peak else best
