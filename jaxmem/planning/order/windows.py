"""Improves a long order where it is worst, one stretch at a time.

A stretch of the order is a problem of its own, with everything before and after it
fixed. The result is not optimal: an operation cannot move out of its stretch.
"""

import time
from collections.abc import Iterator, Sequence

from jaxmem.planning._live_ranges import LiveWalk, OrderProblem
from jaxmem.planning.order.exact import SolutionCache
from jaxmem.planning.order.ideals import WORD

SIZES = (3_000, 100_000)  # sets, see `exact.solve`
LENGTHS = (16, 32, 48, WORD)  # operations of a stretch; a set of them fits in a word


def improved(
    problem: OrderProblem,
    order: Sequence[int],  # a valid order
    aim: int,  # bytes that are low enough
    cache: SolutionCache,  # solves the stretches
    until: float,  # when to stop, by `time.monotonic`
) -> tuple[int, ...]:
    """The order with its worst stretches solved, as long as that lowers the peak."""
    order = list(order)
    walk = LiveWalk(problem)
    at = 0  # how much of the order has been walked
    while time.monotonic() < until:
        profile = problem.profile(order)
        top = max(profile, default=0)
        if top <= aim:
            break
        for a, b in _stretches(profile.index(top), len(order)):
            for i in order[at:a]:
                walk.do(i)
            for i in reversed(order[a:at]):
                walk.undo(i)
            at = a
            stretch = walk.rest(order[a:b])
            solved = cache.solve(stretch, range(b - a), aim, until, SIZES)
            if solved.peak < top:
                order[a:b] = [order[a + i] for i in solved.order]
                break
        else:
            break
    return tuple(order)


def _stretches(at: int, n: int) -> Iterator[tuple[int, int]]:
    """Stretches around a place, short ones first: it in their middle, late, early."""
    seen = set()
    for length in LENGTHS:
        for before in (length // 2, 3 * length // 4, length // 4):
            a = max(0, min(at - before, n - length))
            if (a, length) not in seen:
                seen.add((a, length))
                yield a, min(n, a + length)
