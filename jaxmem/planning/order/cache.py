"""Solves each problem once, where problems differ only in the bytes alive beneath them.

The layers of a network are such problems: the order found for one serves them all.
"""

from collections.abc import Sequence

from jaxmem.planning._live_ranges import OrderProblem
from jaxmem.planning.order.exact import SolvedOrder, solve


class SolutionCache:
    """Solves problems and remembers the orders, with bytes relative to the base."""

    def __init__(self):
        # Problem -> the solution, and the peak that was aimed at.
        self._known: dict[tuple, tuple[SolvedOrder, int]] = {}

    def solve(
        self,
        problem: OrderProblem,  # the operations
        order: Sequence[int],  # one to start from
        aim: int,  # bytes that are low enough
        until: float,  # when to stop, by `time.monotonic`
        sizes: Sequence[int],  # how much may be searched
    ) -> SolvedOrder:
        """An order of a problem, see `exact.solve`."""
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
