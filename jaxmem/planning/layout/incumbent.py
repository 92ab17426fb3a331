"""The lowest layout so far of a problem, and what is known of the least height."""

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from jaxmem.planning.layout.fit import place_in_order
from jaxmem.planning.layout.problem import LayoutProblem

_none = partial(np.zeros, 0, np.int64)


@dataclass
class Incumbent:
    """The lowest layout so far of one problem."""

    problem: LayoutProblem  # the buffers
    goal: int  # the height to reach; never below the bound
    bound: int = 0  # a proven lower bound of the height
    offsets: np.ndarray = field(default_factory=_none)  # of the best layout
    height: int = 2**62  # of the best layout
    order: np.ndarray = field(default_factory=_none)  # in which best fit did best
    fitted: np.ndarray = field(default_factory=_none)  # the offsets of that layout
    long: np.ndarray = field(default_factory=_none)  # of best fit by falling lifetime

    def offer(self, offsets: np.ndarray) -> bool:
        """Takes a layout if it is lower; returns whether it is."""
        height = self.problem.height(offsets)
        lower = height < self.height
        if lower:
            self.offsets, self.height = offsets, height
        return lower

    def fit(self, order: np.ndarray) -> np.ndarray:
        """Offers the layout of best fit in an order; returns its offsets."""
        fitted, height = place_in_order(self.problem, order), self.problem.height
        if not len(self.fitted) or height(fitted) <= height(self.fitted):
            self.order, self.fitted = order, fitted
        self.offer(fitted)
        return fitted

    def prove(self, bound: int) -> None:
        """Raises the bound to what has been proven."""
        self.bound = max(self.bound, bound)
        self.goal = max(self.goal, self.bound)

    @property
    def over(self) -> bool:
        """Whether the goal is reached."""
        return self.height <= self.goal


def least_height(problem: LayoutProblem) -> int:
    """The most alive at once, or the largest buffer: no layout is lower."""
    alone = int(problem.size.max(initial=0))
    return max(int(problem.load.max(initial=0)), alone)
