"""Buffers as arrays: the form in which layouts are searched.

Time counts only as far as it says which buffers are alive together: lifetimes are in
`sections`, the stretches between one event and the next. Sizes are counted in their
greatest common divisor, and buffers of no bytes are left out.

A buffer is made of pieces, which are rectangles: one, if it has no gaps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxmem.planning.layout.buffers import Buffer


class Rectangles(NamedTuple):
    """Rectangles, those of a buffer one after another.

    Attributes:
      owner: the buffer of each.
      first: the first section in which each is there.
      end: the first section after that in which it is not.
      low, high: the units of its buffer that it takes, from the buffer's beginning.
    """

    owner: np.ndarray
    first: np.ndarray
    end: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class LayoutProblem:
    """Buffers of at least one unit.

    Attributes:
      size: in units.
      life: from when each is made to when it is freed, in the time of who asks.
      alignment: units of which each offset must be a multiple.
      floor: units below which each must not lie.
      pieces: what they are made of.
      unit: bytes.
    """

    size: np.ndarray
    life: np.ndarray
    alignment: np.ndarray
    floor: np.ndarray
    pieces: Rectangles
    unit: int

    @cached_property
    def start(self) -> np.ndarray:
        """The number of each buffer's first piece, and of all of them at the end."""
        return np.searchsorted(self.pieces.owner, np.arange(len(self.size) + 1))

    @cached_property
    def first(self) -> np.ndarray:
        """The first section in which each buffer is there."""
        return self.pieces.first[self.start[:-1]]

    @cached_property
    def end(self) -> np.ndarray:
        """The first section after the last one in which it is there."""
        return self.pieces.end[self.start[1:] - 1]

    @cached_property
    def gapless(self) -> bool:
        """Whether every buffer is one rectangle."""
        return len(self.pieces.owner) == len(self.size) and not self.windowed

    @cached_property
    def windowed(self) -> bool:
        """Whether a part of a buffer is there while the rest is not."""
        pieces = self.pieces
        return bool(((pieces.high - pieces.low) < self.size[pieces.owner]).any())

    @cached_property
    def load(self) -> np.ndarray:
        """What is alive in each section; no layout is lower than the most of it."""
        pieces, change = self.pieces, np.zeros(self.end.max(initial=0) + 1, np.int64)
        np.add.at(change, pieces.first, pieces.high - pieces.low)
        np.subtract.at(change, pieces.end, pieces.high - pieces.low)
        return change.cumsum()[:-1]

    @cached_property
    def length(self) -> np.ndarray:
        """Sections from the first to the last in which each buffer is alive."""
        return self.end - self.first

    def height(self, offsets: np.ndarray) -> int:
        """The top of the highest buffer."""
        return int((offsets + self.size).max(initial=0))

    @cached_property
    def fullest(self) -> np.ndarray:
        """The load of the fullest section in which each buffer is alive."""
        load, pieces = np.append(self.load, 0), self.pieces
        both = np.stack([pieces.first, pieces.end], axis=1).reshape(-1)
        if not len(both):
            return load[:0]
        each = np.maximum.reduceat(load, both)[::2]
        return np.maximum.reduceat(each, self.start[:-1])

    def raised(self, offsets: np.ndarray, which: np.ndarray | int) -> np.ndarray:
        """The next offsets at which these buffers are aligned."""
        alignment = self.alignment[which]
        return -(-offsets // alignment) * alignment

    def part(self, chosen: np.ndarray, thin: bool = False) -> "LayoutProblem":
        """The problem of some of the buffers, in the same unit.

        Args:
          chosen: their numbers.
          thin: leave out the sections whose buffers are all alive in another, too. What
            is a layout does not depend on them.
        """
        pieces = self.pieces
        counts = self.start[1:][chosen] - self.start[:-1][chosen]
        ends = np.cumsum(counts)
        some = np.arange(ends[-1] if len(ends) else 0)
        some += np.repeat(self.start[:-1][chosen] - ends + counts, counts)
        first, end = _sections(pieces.first[some], pieces.end[some], thin)
        owner = np.repeat(np.arange(len(chosen)), counts)
        return LayoutProblem(
            self.size[chosen],
            self.life[chosen],
            self.alignment[chosen],
            self.floor[chosen],
            Rectangles(owner, first, end, pieces.low[some], pieces.high[some]),
            self.unit,
        )

    def above(self, floor: np.ndarray) -> "LayoutProblem":
        """The problem of the same buffers with nothing below these units.

        Args:
          floor: of each buffer.
        """
        every = np.arange(len(self.size))
        return replace(self, floor=self.raised(np.maximum(self.floor, floor), every))

    def stretches(self) -> list[np.ndarray]:
        """The buffers of each stretch of time, with nothing alive between two."""
        order = self.first.argsort(kind="stable")
        ends = np.maximum.accumulate(self.end[order])
        cuts = np.flatnonzero(self.first[order][1:] >= ends[:-1]) + 1
        return np.split(order, cuts) if len(order) else []


def make_problem(buffers: Sequence[Buffer]) -> LayoutProblem:
    """The problem of buffers of which something is there at some time."""
    rows = [(i, *p) for i, b in enumerate(buffers) for p in b.pieces()]
    owner, lower, upper, low, high = np.array(rows, np.int64).reshape(-1, 5).T
    column = lambda values: np.array(list(values), np.int64)
    size, alignment = (
        column(b.size for b in buffers),
        column(b.alignment for b in buffers),
    )
    # Offsets are sums of sizes and of parts of them, or multiples of alignments.
    within = size[owner] - low, size[owner] - high, low, high
    unit = int(np.gcd.reduce(np.concatenate([size, alignment[alignment > 1], *within])))
    unit = unit or 1
    # In Python's numbers: a life may be longer than an int64.
    life = [b.upper - b.lower for b in buffers]
    ranks = {length: rank for rank, length in enumerate(sorted(set(life)))}
    return LayoutProblem(
        size // unit,
        column(ranks[length] for length in life),
        np.maximum(alignment // unit, 1),
        np.zeros(len(buffers), np.int64),
        Rectangles(owner, *_sections(lower, upper), low // unit, high // unit),
        unit,
    )


def _sections(
    lower: np.ndarray, upper: np.ndarray, thin: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    times = np.unique(np.concatenate([lower, upper]))
    counts = np.ones(max(len(times) - 1, 0), bool)
    if thin:  # what counts is between something made and the next that is freed
        counts = np.isin(times, lower)[:-1] & np.isin(times, upper)[1:]
    number = np.concatenate([[0], counts.cumsum()])
    return number[np.searchsorted(times, lower)], number[np.searchsorted(times, upper)]
