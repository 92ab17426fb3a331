"""Small problems that are the same but for what lies alive beneath them, solved once.

The layers of a network are: what was found for one holds for all.
"""

from collections.abc import Sequence

from jaxmem.planning._exact import Solved, solve
from jaxmem.planning._pieces import Pieces


class Once:
    """Solves problems and remembers them; bytes are kept as those above the base."""

    def __init__(self):
        self._known: dict[
            tuple, tuple[Solved, int]
        ] = {}  # and the aim it was tried for

    def solve(
        self,
        problem: Pieces,
        order: Sequence[int],
        aim: int,
        until: float,
        sizes: Sequence[int],
    ) -> Solved:
        """An order of a problem, see `_exact.solve`.

        Args:
          problem: the operations.
          order: one to start from.
          aim: bytes that are low enough.
          until: when to stop, by `time.monotonic`.
          sizes: how much may be searched.

        Returns:
          `Solved`; its bound is the larger of what is proven and 0 above the base.
        """
        key, base = problem.key(), problem.base
        known, tried = self._known.get(key, (None, 0))
        if known is None or tried < aim - base and known.peak > known.bound:
            found = solve(problem, order, aim, until=until, sizes=sizes)
            proven = found.bound - base if found.bound > aim else 0
            known = Solved(found.order, found.peak - base, max(0, proven))
            self._known[key] = known, aim - base
        return Solved(known.order, known.peak + base, known.bound + base)
