"""Long-lived buffers stacked at the bottom of the arena, and the floor that they leave.

A training step keeps thousands of activations for its backward pass. They are alive
nearly all at once, with nested lifetimes: placed first, they stack almost without a
gap. What remains to be decided is how the short-lived buffers lie above them.
"""

from dataclasses import dataclass

import numpy as np

from jaxmem.planning.layout.fit import simple_order
from jaxmem.planning.layout.problem import LayoutProblem

_SHARES = (2, 4, 8, 16, 64)  # a life is long from 1 / share of the longest one on
_LEAST = 0.05  # of all buffers: a smaller stack would not shrink the problem


@dataclass(frozen=True)
class BottomStack:
    """Long-lived buffers with fixed offsets, and the problem of those above them."""

    offsets: np.ndarray  # of all buffers, in the layout that the stack is taken from
    long: np.ndarray  # which buffers are in the stack
    rest: np.ndarray  # the numbers of the others
    above: LayoutProblem  # of the others, each with the floor that the stack leaves it
    need: int  # units that the stack and the others take at least

    def with_rest(self, offsets: np.ndarray) -> np.ndarray:
        """The offsets of all buffers, given those of the others."""
        every = self.offsets.copy()
        every[self.rest] = offsets
        return every


def no_bottom(problem: LayoutProblem) -> BottomStack:
    """The empty stack."""
    none = np.zeros(len(problem.size), bool)
    offsets = np.zeros(len(problem.size), np.int64)
    return BottomStack(offsets, none, np.arange(len(problem.size)), problem, 0)


def bottoms(problem: LayoutProblem, offsets: np.ndarray) -> list[BottomStack]:
    """Possible stacks, the largest first."""
    # The offsets are those of best fit by falling lifetime: so the ones of long-lived
    # buffers do not depend on the others.
    if not len(offsets):
        return []
    order, longest = simple_order(problem, "lifetime"), int(problem.length.max())
    base, rest_load = np.zeros(len(problem.load), np.int64), problem.load.copy()
    counts = {int((problem.length * s >= longest).sum()) for s in _SHARES}
    stacks, done = [], 0
    for count in sorted(counts):
        _stack(problem, offsets, order[done:count], base, rest_load)
        done = count
        if _LEAST * len(order) <= count < len(order):
            need = int((base + rest_load).max())
            stacks.append(_bottom(problem, offsets, order[:count], base, need))
    return stacks[::-1]


def _stack(problem, offsets, buffers, base, rest_load) -> None:
    """Adds buffers to the stack: raises its top, and lowers the load of the others."""
    rectangles = problem.rectangles
    for buffer in buffers.tolist():
        for p in range(problem.start[buffer], problem.start[buffer + 1]):
            where = slice(rectangles.first[p], rectangles.end[p])
            base[where] = np.maximum(base[where], offsets[buffer] + rectangles.high[p])
            rest_load[where] -= rectangles.high[p] - rectangles.low[p]


def _bottom(problem, offsets, buffers, base, need: int) -> BottomStack:
    long = np.zeros(len(problem.size), bool)
    long[buffers] = True
    rest = np.flatnonzero(~long)
    rectangles = problem.rectangles
    both = np.stack([rectangles.first, rectangles.end], axis=1).reshape(-1)
    under = np.maximum.reduceat(np.append(base, 0), both)[::2] - rectangles.low
    floor = np.maximum(np.maximum.reduceat(under, problem.start[:-1]), 0)
    above = problem.subset(rest).above(floor[rest])
    return BottomStack(offsets, long, rest, above, need)
