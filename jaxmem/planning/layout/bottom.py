"""What lives long, stacked at the bottom of the arena, and the floor that it leaves.

The activations that a training step keeps for its backward pass are thousands, alive
nearly all at once, with nested lifetimes: placed first, they stack almost without a
gap. What remains to be decided is how the short-lived lie above them.
"""

from dataclasses import dataclass

import numpy as np

from jaxmem.planning.layout.fit import simple_order
from jaxmem.planning.layout.problem import LayoutProblem

_SHARES = (2, 4, 8, 16, 64)  # of the longest life: what is called long
_LEAST = 0.05  # of the buffers: fewer are not worth it


@dataclass(frozen=True)
class BottomStack:
    """Some buffers at their places.

    Attributes:
      offsets: of all buffers, in the layout that they are taken from.
      long: which buffers stay there.
      rest: the numbers of the others.
      above: the problem of the others, with the floors that are left to them.
      need: units without which the others do not fit above.
    """

    offsets: np.ndarray
    long: np.ndarray
    rest: np.ndarray
    above: LayoutProblem
    need: int

    def with_rest(self, offsets: np.ndarray) -> np.ndarray:
        """The offsets of all, when those of the others are these."""
        found = self.offsets.copy()
        found[self.rest] = offsets
        return found


def no_bottom(problem: LayoutProblem) -> BottomStack:
    """All buffers are free."""
    none = np.zeros(len(problem.size), bool)
    offsets = np.zeros(len(problem.size), np.int64)
    return BottomStack(offsets, none, np.arange(len(problem.size)), problem, 0)


def bottoms(problem: LayoutProblem, offsets: np.ndarray) -> list[BottomStack]:
    """What may stay at the bottom, the most first.

    Args:
      problem: the buffers.
      offsets: by best fit in the order of falling lifetime, so that those of what
        lives longest do not depend on the rest.
    """
    if not len(offsets):
        return []
    order, longest = simple_order(problem, "lifetime"), int(problem.length.max())
    base, rest_load = np.zeros(len(problem.load), np.int64), problem.load.copy()
    counts = {int((problem.length * s >= longest).sum()) for s in _SHARES}
    found, done = [], 0
    for count in sorted(counts):
        _stack(problem, offsets, order[done:count], base, rest_load)
        done = count
        if _LEAST * len(order) <= count < len(order):
            need = int((base + rest_load).max())
            found.append(_bottom(problem, offsets, order[:count], base, need))
    return found[::-1]


def _stack(problem, offsets, buffers, base, rest_load) -> None:
    """Puts buffers into the profile of what lies, and takes them from the rest."""
    pieces = problem.pieces
    for buffer in buffers.tolist():
        for p in range(problem.start[buffer], problem.start[buffer + 1]):
            where = slice(pieces.first[p], pieces.end[p])
            np.maximum(base[where], offsets[buffer] + pieces.high[p], out=base[where])
            rest_load[where] -= pieces.high[p] - pieces.low[p]


def _bottom(problem, offsets, buffers, base, need: int) -> BottomStack:
    long = np.zeros(len(problem.size), bool)
    long[buffers] = True
    rest = np.flatnonzero(~long)
    pieces = problem.pieces
    both = np.stack([pieces.first, pieces.end], axis=1).reshape(-1)
    under = np.maximum.reduceat(np.append(base, 0), both)[::2] - pieces.low
    floor = np.maximum(np.maximum.reduceat(under, problem.start[:-1]), 0)
    above = problem.part(rest).above(floor[rest])
    return BottomStack(offsets, long, rest, above, need)
