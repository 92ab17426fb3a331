"""Buffers as arrays: the form in which layouts are searched.

Time counts only as far as it says which buffers are alive together. A moment whose
buffers are all alive at another moment too says nothing new, so the moments that are
left are those at which something was just made and something is about to be freed:
`sections`, about half of all. Sizes are counted in their greatest common divisor.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

# The sum of all sizes must stay below: sums of two such are still int64.
MOST = 2**61


@dataclass(frozen=True)
class Problem:
    """Buffers of at least one byte, with lifetimes in sections.

    Attributes:
      first: the first section in which each buffer is alive.
      end: the first section after that in which it is not.
      size: in units of `unit`.
      unit: bytes.
      index: the place of each buffer in what the problem was made of.
    """

    first: np.ndarray
    end: np.ndarray
    size: np.ndarray
    unit: int
    index: np.ndarray

    @cached_property
    def load(self) -> np.ndarray:
        """What is alive in each section."""
        change = np.zeros(self.end.max(initial=0) + 1, np.int64)
        np.add.at(change, self.first, self.size)
        np.subtract.at(change, self.end, self.size)
        return change.cumsum()[:-1]

    @cached_property
    def bound(self) -> int:
        """No layout is lower than what is alive at once."""
        return int(self.load.max(initial=0))

    @cached_property
    def length(self) -> np.ndarray:
        """Sections in which each buffer is alive."""
        return self.end - self.first

    def part(self, chosen: np.ndarray) -> "Problem":
        """The same problem of some of its buffers."""
        return make_problem(
            self.first[chosen],
            self.end[chosen],
            self.size[chosen] * self.unit,
            self.index[chosen],
        )

    def parts(self) -> list["Problem"]:
        """One problem for each stretch of time with nothing alive between them."""
        order = self.first.argsort(kind="stable")
        ends = np.maximum.accumulate(self.end[order])
        cuts = np.flatnonzero(self.first[order][1:] >= ends[:-1]) + 1
        return [self.part(np.sort(chosen)) for chosen in np.split(order, cuts)]


def make_problem(
    lower: np.ndarray,
    upper: np.ndarray,
    size: np.ndarray,
    index: np.ndarray | None = None,
) -> Problem:
    """The problem of buffers alive in [lower, upper); those of no bytes are left out."""
    index = np.arange(len(size)) if index is None else index
    some = size > 0
    lower, upper, size, index = lower[some], upper[some], size[some], index[some]
    first, end = _sections(lower, upper)
    unit = int(np.gcd.reduce(size)) if len(size) else 1
    return Problem(first, end, size // unit, unit, index)


def _sections(lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lifetimes counted in the moments that matter."""
    times = np.unique(np.concatenate([lower, upper]))
    made, freed = np.isin(times, lower), np.isin(times, upper)
    if len(times) == 0:
        return lower, upper
    # [times[i], times[i + 1]) matters if a buffer begins with it and one ends with it.
    matters = made[:-1] & freed[1:]
    before = np.concatenate([[0], matters.cumsum()])
    return before[np.searchsorted(times, lower)], before[np.searchsorted(times, upper)]
