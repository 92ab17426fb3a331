"""Buffers as arrays: the form in which layouts are searched.

Time matters only as far as it says which buffers are alive together: lifetimes are in
`sections`, the intervals between one event and the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxmem.planning.layout.buffers import Buffer


class Rectangles(NamedTuple):
    """Arrays of rectangles, those of a buffer one after another."""

    owner: np.ndarray  # the buffer of each
    first: np.ndarray  # the first section of each
    end: np.ndarray  # the section after its last
    low: np.ndarray  # from which unit of its buffer it occupies
    high: np.ndarray  # up to which


@dataclass(frozen=True)
class LayoutProblem:
    """Buffers of at least one unit."""

    size: np.ndarray  # in units
    life: np.ndarray  # the rank of the time from allocation to release
    alignment: np.ndarray  # units; each offset must be a multiple of it
    floor: np.ndarray  # the least offset of each, in units
    rectangles: Rectangles  # of all buffers
    unit: int  # bytes, the greatest common divisor of sizes

    @cached_property
    def start(self) -> np.ndarray:
        """The number of each buffer's first rectangle; the count of all at the end."""
        return np.searchsorted(self.rectangles.owner, np.arange(len(self.size) + 1))

    @cached_property
    def first(self) -> np.ndarray:
        """The first section of each buffer."""
        return self.rectangles.first[self.start[:-1]]

    @cached_property
    def end(self) -> np.ndarray:
        """The section after the last of each buffer."""
        return self.rectangles.end[self.start[1:] - 1]

    @cached_property
    def windowed(self) -> bool:
        """Whether only a part of a buffer is in use at some time."""
        part = self.rectangles.high - self.rectangles.low
        return bool((part < self.size[self.rectangles.owner]).any())

    @cached_property
    def load(self) -> np.ndarray:
        """The units alive in each section; no layout is lower than their maximum."""
        rectangles = self.rectangles
        change = np.zeros(self.end.max(initial=0) + 1, np.int64)
        np.add.at(change, rectangles.first, rectangles.high - rectangles.low)
        np.subtract.at(change, rectangles.end, rectangles.high - rectangles.low)
        return change.cumsum()[:-1]

    @cached_property
    def length(self) -> np.ndarray:
        """The number of sections from the first to the last of each buffer."""
        return self.end - self.first

    def height(self, offsets: np.ndarray) -> int:
        """The top of the highest buffer."""
        return int((offsets + self.size).max(initial=0))

    @cached_property
    def fullest(self) -> np.ndarray:
        """The load of the fullest section of each buffer."""
        load, rectangles = np.append(self.load, 0), self.rectangles
        both = np.stack([rectangles.first, rectangles.end], axis=1).reshape(-1)
        if not len(both):
            return load[:0]
        each = np.maximum.reduceat(load, both)[::2]
        return np.maximum.reduceat(each, self.start[:-1])

    def raised(self, offsets: np.ndarray, which: np.ndarray | int) -> np.ndarray:
        """The offsets rounded up to the alignment of these buffers."""
        alignment = self.alignment[which]
        return -(-offsets // alignment) * alignment

    def subset(self, chosen: np.ndarray, thin: bool = False) -> "LayoutProblem":
        """The problem of some of the buffers, in the same unit."""
        # `thin` leaves out sections whose buffers are all alive in another section:
        # whether a layout is valid does not depend on them.
        rectangles = self.rectangles
        counts = self.start[1:][chosen] - self.start[:-1][chosen]
        ends = np.cumsum(counts)
        some = np.arange(ends[-1] if len(ends) else 0)
        some += np.repeat(self.start[:-1][chosen] - ends + counts, counts)
        first, end = _sections(rectangles.first[some], rectangles.end[some], thin)
        owner = np.repeat(np.arange(len(chosen)), counts)
        return LayoutProblem(
            self.size[chosen],
            self.life[chosen],
            self.alignment[chosen],
            self.floor[chosen],
            Rectangles(owner, first, end, rectangles.low[some], rectangles.high[some]),
            self.unit,
        )

    def above(self, floor: np.ndarray) -> "LayoutProblem":
        """The problem of the same buffers with a least offset for each."""
        every = np.arange(len(self.size))
        return replace(self, floor=self.raised(np.maximum(self.floor, floor), every))

    def stretches(self) -> list[np.ndarray]:
        """The buffers of each stretch of time, with nothing alive between two."""
        order = self.first.argsort(kind="stable")
        ends = np.maximum.accumulate(self.end[order])
        cuts = np.flatnonzero(self.first[order][1:] >= ends[:-1]) + 1
        return np.split(order, cuts) if len(order) else []


def make_problem(buffers: Sequence[Buffer]) -> LayoutProblem:
    """The problem of buffers that each have at least one rectangle."""
    rows = [(i, *p) for i, b in enumerate(buffers) for p in b.rectangles()]
    owner, lower, upper, low, high = np.array(rows, np.int64).reshape(-1, 5).T
    column = lambda values: np.array(list(values), np.int64)
    size = column(b.size for b in buffers)
    alignment = column(b.alignment for b in buffers)
    # Offsets are sums of sizes and of windows' ends, or multiples of alignments.
    within = size[owner] - low, size[owner] - high, low, high
    unit = int(np.gcd.reduce(np.concatenate([size, alignment[alignment > 1], *within])))
    unit = unit or 1
    # As ranks of Python integers, since a life may be longer than an int64.
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
    if thin:  # the fullest sections lie between an allocation and the next release
        counts = np.isin(times, lower)[:-1] & np.isin(times, upper)[1:]
    number = np.concatenate([[0], counts.cumsum()])
    return number[np.searchsorted(times, lower)], number[np.searchsorted(times, upper)]
