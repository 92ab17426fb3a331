"""Small problems that are the same but for what lies alive beneath them, solved once.

The layers of a network are: what was found for one holds for all.
"""

from collections.abc import Sequence

from jaxmem.planning._live_ranges import OrderProblem
from jaxmem.planning.order.exact import SolvedOrder, solve


class SolutionCache:
    """Solves problems and remembers them; bytes are kept as those above the base."""

    def __init__(self):
        # What was found, and the aim at which it was looked for.
        self._known: dict[tuple, tuple[SolvedOrder, int]] = {}

    def solve(
        self,
        problem: OrderProblem,
        order: Sequence[int],
        aim: int,
        until: float,
        sizes: Sequence[int],
    ) -> SolvedOrder:
        """An order of a problem, see `_exact.solve`.

        Args:
          problem: the operations.
          order: one to start from.
          aim: bytes that are low enough.
          until: when to stop, by `time.monotonic`.
          sizes: how much may be searched.

        Returns:
          `SolvedOrder`; its bound is the larger of what is proven and 0 above the base.
        """
        key, base = problem.key(), problem.base
        known, tried = self._known.get(key, (None, 0))
        if known is None or _worth_more(known, tried, aim - base):
            start = order if known is None else known.order
            found = solve(problem, start, aim, until=until, sizes=sizes)
            proven = found.bound - base if found.bound > aim else 0
            known = SolvedOrder(found.order, found.peak - base, max(0, proven))
            self._known[key] = known, aim - base
        return SolvedOrder(known.order, known.peak + base, known.bound + base)


def _worth_more(known: SolvedOrder, tried: int, aim: int) -> bool:
    """Whether another search could bring more than the one at the aim `tried`.

    It could not if it was in vain there and the new aim is as low or lower.
    """
    in_vain = known.peak > tried >= aim
    return known.peak > max(aim, known.bound) and not in_vain
