"""Buffers as arrays: the form in which layouts are searched.

Time counts only as far as it says which buffers are alive together: lifetimes are in
`sections`, the stretches between one event and the next. Sizes are counted in their
greatest common divisor, and buffers of no bytes are left out.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Problem:
    """Buffers of at least one unit.

    Attributes:
      first: the first section in which each buffer is alive.
      end: the first section after that in which it is not.
      size: in units.
      unit: bytes.
    """

    first: np.ndarray
    end: np.ndarray
    size: np.ndarray
    unit: int

    @cached_property
    def load(self) -> np.ndarray:
        """What is alive in each section; no layout is lower than the most of it."""
        change = np.zeros(self.end.max(initial=0) + 1, np.int64)
        np.add.at(change, self.first, self.size)
        np.subtract.at(change, self.end, self.size)
        return change.cumsum()[:-1]

    @cached_property
    def length(self) -> np.ndarray:
        """Sections in which each buffer is alive."""
        return self.end - self.first

    def height(self, offsets: np.ndarray) -> int:
        """The top of the highest buffer."""
        return int((offsets + self.size).max(initial=0))

    @cached_property
    def fullest(self) -> np.ndarray:
        """The load of the fullest section in which each buffer is alive."""
        load = np.append(self.load, 0)
        both = np.stack([self.first, self.end], axis=1).reshape(-1)
        return np.maximum.reduceat(load, both)[::2] if len(both) else load[:0]

    def part(self, chosen: np.ndarray, thin: bool = False) -> "Problem":
        """The problem of some of the buffers, in the same unit.

        Args:
          chosen: their numbers.
          thin: leave out the sections whose buffers are all alive in another, too. What
            is a layout does not depend on them.
        """
        first, end = _sections(self.first[chosen], self.end[chosen], thin)
        return Problem(first, end, self.size[chosen], self.unit)

    def stretches(self) -> list[np.ndarray]:
        """The buffers of each stretch of time, with nothing alive between two."""
        order = self.first.argsort(kind="stable")
        ends = np.maximum.accumulate(self.end[order])
        cuts = np.flatnonzero(self.first[order][1:] >= ends[:-1]) + 1
        return np.split(order, cuts) if len(order) else []


def make_problem(lower: np.ndarray, upper: np.ndarray, size: np.ndarray) -> Problem:
    """The problem of buffers of at least one byte, alive in [lower, upper)."""
    unit = int(np.gcd.reduce(size)) if len(size) else 1
    return Problem(*_sections(lower, upper), size // unit, unit)


def _sections(
    lower: np.ndarray, upper: np.ndarray, thin: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    times = np.unique(np.concatenate([lower, upper]))
    counts = np.ones(max(len(times) - 1, 0), bool)
    if thin:  # what counts is between something made and the next that is freed
        counts = np.isin(times, lower)[:-1] & np.isin(times, upper)[1:]
    number = np.concatenate([[0], counts.cumsum()])
    return number[np.searchsorted(times, lower)], number[np.searchsorted(times, upper)]
