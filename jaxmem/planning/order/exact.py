"""The best order of some dozens of operations: a search over sets of operations.

Is there an order with no more than P bytes? The bytes alive depend on the set of
operations that have run, not on their order, so the search goes over such sets (order
ideals), those of k operations in the k-th layer (`ideals`).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxmem.planning._live_ranges import OrderProblem
from jaxmem.planning.order.ideals import (
    UNBLOCKED,
    IdealLayer,
    empty_layer,
    following,
    merged,
    possible,
    set_operations,
)

CHUNK = 1 << 18  # sets expanded at a time, which bounds the memory of the search
SIZES = (3_000, 100_000, 3_000_000, 40_000_000)  # sets before the direction changes
WIDTH = 1_000  # sets in a layer of a beam
HALVES = 6  # limits under which a beam is tried


@dataclass(frozen=True)
class LimitedOrder:
    """The result of a search for an order under a limit."""

    order: tuple[int, ...] | None  # None if there is none, or none was found
    complete: bool  # whether all sets were searched: without an order there is none
    next: int  # bytes that would let the search go on, proven if all sets were searched
    sets: int  # how many were searched


@dataclass(frozen=True)
class SolvedOrder:
    """An order and what is known of the optimum."""

    order: tuple[int, ...]
    peak: int  # its bytes
    bound: int  # no order has fewer


def solve(
    problem: OrderProblem,
    order: Sequence[int],  # one to start from
    bound: int,  # bytes that every order has alive at some time
    *,
    until: float = float("inf"),  # when to stop, by `time.monotonic`
    sizes: Sequence[int] = SIZES,  # sets searched forward, backward, then the next size
) -> SolvedOrder:
    """The best order, or the best that was found."""
    # The limit rises from a proven bound until there is an order: it is the optimum.
    best = SolvedOrder(tuple(order), problem.peak(order), bound)
    # A graph can be narrow in one direction and wide in the other.
    directions = ((problem, 1), (problem.reversed, -1))
    limits, beam_tried = 0, False
    while best.bound < best.peak:
        # First from the bound up, where a search is small, then by halves.
        limit = best.bound + (0 if limits < 3 else (best.peak - best.bound) // 2)
        result = _either(directions, limit, sizes[:2], until)
        if result is None and not beam_tried:
            best, beam_tried = _beam(directions, best, until), True
            continue
        result = result or _either(directions, limit, sizes[2:], until)
        if result is None:
            break
        limits += 1
        if result.order is None:
            best = replace(best, bound=min(result.next, best.peak))
        else:
            best = replace(best, order=result.order, peak=problem.peak(result.order))
    return best


# Problems, each with the slice step that turns its orders into forward ones.
_Directions = Sequence[tuple[OrderProblem, int]]


def _either(
    directions: _Directions, limit: int, sizes: Sequence[int], until: float
) -> LimitedOrder | None:
    """The result of the first search that finishes, in one direction or the other."""
    for size in sizes:
        for problem, step in directions:
            result = search(problem, limit, sets=size, until=until)
            if result.order is not None:
                return replace(result, order=result.order[::step])
            if result.complete:
                return result
    return None


def _beam(directions: _Directions, best: SolvedOrder, until: float) -> SolvedOrder:
    """What searches with narrow layers find, under limits that halve the gap."""
    for problem, step in directions:
        low = best.bound
        for _ in range(HALVES):
            limit = (low + best.peak) // 2
            if limit >= best.peak:
                break
            result = search(problem, limit, width=WIDTH, until=until)
            if result.order is None:
                low = limit + 1
            else:
                peak = problem.peak(result.order)
                best = replace(best, order=result.order[::step], peak=peak)
    return best


def search(
    problem: OrderProblem,
    limit: int,  # bytes
    *,
    sets: int = SIZES[-1],  # how many sets may be searched
    width: int | None = None,  # how many sets a layer may have; None is all
    until: float = float("inf"),  # when to stop, by `time.monotonic`
) -> LimitedOrder:
    """An order with at most `limit` bytes alive."""
    operations = set_operations(problem)
    layer = empty_layer(problem)
    trace: list[IdealLayer] = []
    seen, complete, blocked = 1, True, UNBLOCKED
    for _ in operations:
        layers = []
        candidates = possible(layer, operations)
        for start in range(0, len(layer.live), CHUNK):
            after, least = following(layer, start, CHUNK, candidates, limit)
            layers += after
            blocked = min(blocked, least)
            if time.monotonic() > until:
                return LimitedOrder(None, False, blocked, seen)
        if not layers:
            return LimitedOrder(None, complete, blocked, seen)
        layer = merged(layers)
        if width and len(layer.live) > width:  # the lowest alone: nothing is proven
            lowest = np.sort(np.argsort(layer.live, kind="stable")[:width])
            layer, complete = layer.at(lowest), False
        trace.append(layer.without_sets())
        seen += len(layer.live)
        if seen > sets:
            return LimitedOrder(None, False, blocked, seen)
    return LimitedOrder(_path(trace), complete, limit, seen)


def _path(trace: Sequence[IdealLayer]) -> tuple[int, ...]:
    """The operations that led to the only set of the last layer."""
    order, place = [], 0
    for layer in reversed(trace):
        order.append(int(layer.last[place]))
        place = int(layer.parent[place])
    return tuple(reversed(order))


class SolutionCache:
    """Solves problems and remembers the orders, with bytes relative to the base."""

    # The layers of a network differ only in the bytes alive beneath them, so the order
    # found for one serves them all.

    def __init__(self):
        # Problem -> the solution, and the peak that was aimed at.
        self._known: dict[tuple, tuple[SolvedOrder, int]] = {}

    def solve(
        self,
        problem: OrderProblem,
        order: Sequence[int],  # one to start from
        aim: int,  # bytes that are low enough
        until: float,  # when to stop, by `time.monotonic`
        sizes: Sequence[int],  # how much may be searched
    ) -> SolvedOrder:
        """An order of a problem, see `solve`."""
        key, base = problem.key(), problem.base
        known, tried = self._known.get(key, (None, 0))
        if known is None or _worth_more(known, tried, aim - base):
            start = order if known is None else known.order
            solved = solve(problem, start, aim, until=until, sizes=sizes)
            # A bound that is no more than the aim was assumed, not proven.
            proven = solved.bound - base if solved.bound > aim else 0
            known = SolvedOrder(solved.order, solved.peak - base, max(0, proven))
            self._known[key] = known, aim - base
        return SolvedOrder(known.order, known.peak + base, known.bound + base)


def _worth_more(known: SolvedOrder, tried: int, aim: int) -> bool:
    """Whether another search could find more than the one that aimed at `tried`."""
    # It cannot if that search failed and the new aim is as low or lower.
    failed = known.peak > tried >= aim
    return known.peak > max(aim, known.bound) and not failed
