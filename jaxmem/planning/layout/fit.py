"""Best fit: places buffers one after another, each in the tightest gap that takes it.

XLA lays out twice by best fit, in the order of falling size and in that of falling
lifetime, and keeps the lower layout (`GlobalDecreasingSizeBestFitHeap`).
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from jaxmem.planning.layout.problem import LayoutProblem


def place_in_order(
    problem: LayoutProblem,
    order: np.ndarray,  # the buffers to place
    placed: np.ndarray | None = None,  # the buffers that have an offset already, if any
    offsets: np.ndarray | None = None,  # of all buffers; those of `placed` count
) -> np.ndarray:
    """Offsets of buffers that are placed in this order."""
    placed = np.zeros(0, np.int64) if placed is None else placed
    offsets = np.zeros(len(problem.size), np.int64) if offsets is None else offsets
    shelf, result = _PlacedRectangles(problem, placed, offsets), offsets.copy()
    for buffer in order.tolist():
        result[buffer] = shelf.place(buffer)
    return result


def simple_order(problem: LayoutProblem, by: Literal["size", "lifetime"]) -> np.ndarray:
    """The order of `best_fit`: by falling size, or by falling lifetime."""
    keys = -problem.life, -problem.size
    keys = keys if by == "size" else keys[::-1]
    return np.lexsort((problem.first, *keys))


def orders(problem: LayoutProblem, early: np.ndarray) -> Iterator[np.ndarray]:
    """Orders that do well on training steps, each once; XLA's two among the first."""
    # Those between them place long-lived buffers first, for several meanings of long:
    # their lifetimes are nested, so they stack without a gap, and short-lived buffers
    # fill the space above (ROAM, https://arxiv.org/abs/2310.19295, section 3.4).
    distinct = {order.tobytes(): order for order in _orders(problem, early)}
    yield from distinct.values()


def _orders(problem: LayoutProblem, early: np.ndarray) -> Iterator[np.ndarray]:
    size, length = problem.size, problem.length
    if early.any():
        yield np.lexsort((problem.first, -size, -length * early, ~early))
    yield simple_order(problem, "size")
    yield simple_order(problem, "lifetime")
    longest = int(length.max(initial=1))
    shares = {longest // share for share in (1, 2, 4, 8, 16, 64)}
    for least in sorted({0, longest + 1} | shares):
        yield np.lexsort((problem.first, -size, np.where(length < least, 0, -length)))


class _PlacedRectangles:
    """The rectangles that are placed, from the lowest up."""

    def __init__(self, problem: LayoutProblem, placed: np.ndarray, offsets: np.ndarray):
        self.problem, rectangles = problem, problem.rectangles
        lying = np.zeros(len(problem.size), bool)
        lying[placed] = True
        rows = np.flatnonzero(lying[rectangles.owner])
        low = offsets[rectangles.owner] + rectangles.low
        top = offsets[rectangles.owner] + rectangles.high
        rows, self.count = rows[low[rows].argsort(kind="stable")], len(rows)
        # The columns have room for all rectangles; entries from `count` on are unused.
        rest = np.zeros(len(rectangles.owner) - len(rows), np.int64)
        self.first, self.end, self.low, self.top = (
            np.concatenate([column[rows], rest])
            for column in (rectangles.first, rectangles.end, low, top)
        )
        self._rectangles = list(
            zip(*(column.tolist() for column in rectangles[1:]), strict=True)
        )
        self._start = problem.start.tolist()

    def place(self, buffer: int) -> int:
        """Places a buffer in the tightest gap that takes it; returns its offset."""
        problem = self.problem
        mine = self._rectangles[self._start[buffer] : self._start[buffer + 1]]
        below, top = self._forbidden(mine)
        floor, alignment = int(problem.floor[buffer]), int(problem.alignment[buffer])
        offset = tightest(below, top, floor, alignment)
        for first, end, low, high in mine:
            self._insert(first, end, offset + low, offset + high)
        return offset

    def _forbidden(self, rectangles) -> tuple[np.ndarray, np.ndarray]:
        """Ranges of offsets at which a buffer would overlap, by rising beginning."""
        count, ranges = self.count, []
        for first, end, low, high in rectangles:
            beside = (self.first[:count] < end) & (self.end[:count] > first)
            below = self.low[:count][beside] - high
            ranges.append((below, self.top[:count][beside] - low))
        if len(ranges) == 1:
            return ranges[0]
        below, top = (np.concatenate(x) for x in zip(*ranges, strict=True))
        order = below.argsort(kind="stable")
        return below[order], top[order]

    def _insert(self, *row: int) -> None:
        at = int(self.low[: self.count].searchsorted(row[2]))
        columns = self.first, self.end, self.low, self.top
        for column, value in zip(columns, row, strict=True):
            column[at + 1 : self.count + 1] = column[at : self.count]
            column[at] = value
        self.count += 1


def tightest(
    below: np.ndarray, top: np.ndarray, floor: int, alignment: int, most: int = 2**62
) -> int:
    """The lowest aligned offset from `floor` to `most` in the smallest gap, else -1."""
    # Offsets between `below` and `top` are forbidden; these come by rising `below`.
    if not len(below):
        return floor if floor <= most else -1
    begins = np.empty(len(below) + 1, np.int64)
    begins[0] = floor
    np.maximum(np.maximum.accumulate(top), floor, out=begins[1:])
    if alignment > 1:
        begins = -(-begins // alignment) * alignment
    gaps = np.minimum(below, most) - begins[:-1]
    gaps[gaps < 0] = np.iinfo(np.int64).max
    best = int(gaps.argmin())
    if gaps[best] < np.iinfo(np.int64).max:
        return int(begins[best])
    return int(begins[-1]) if begins[-1] <= most else -1
