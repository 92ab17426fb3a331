"""Best fit: buffers one after another, each into the tightest gap that takes it.

XLA lays out twice by best fit, in the order of falling size and in that of falling
lifetime, and keeps the lower layout (`GlobalDecreasingSizeBestFitHeap`). ROAM
(https://arxiv.org/abs/2310.19295, section 3.4) puts what lives long, a training step's
kept activations, at the bottom first: their lifetimes are nested, so they stack without
a gap, and the short-lived fill what is above. `orders` has both, and what lies between:
long-lived ones first, for several meanings of long.
"""

from collections.abc import Iterator

import numpy as np

from jaxmem.planning._layout_problem import Problem


def best_fit(
    problem: Problem,
    order: np.ndarray,
    placed: np.ndarray | None = None,
    offsets: np.ndarray | None = None,
) -> np.ndarray:
    """Offsets when buffers are placed in this order.

    Args:
      problem: the buffers.
      order: those to place.
      placed: those that lie already, if any.
      offsets: where they lie; an entry for every buffer of the problem.

    Returns:
      An offset for every buffer, int64.
    """
    placed = np.zeros(0, np.int64) if placed is None else placed
    offsets = np.zeros(len(problem.size), np.int64) if offsets is None else offsets
    shelf, result = _Shelf(problem, placed, offsets), offsets.copy()
    for buffer in order.tolist():
        result[buffer] = shelf.place(buffer)
    return result


def orders(problem: Problem, early: np.ndarray) -> Iterator[np.ndarray]:
    """Orders that do well on training steps.

    Args:
      problem: the buffers.
      early: true for those to be placed before all others.
    """
    size, length = problem.size, problem.length
    if early.any():
        yield np.lexsort((problem.first, -size, -length * early, ~early))
    longest = int(length.max(initial=1))
    shares = {longest // share for share in (1, 2, 4, 8, 16, 64)}
    for least in sorted({0, longest + 1} | shares):
        yield np.lexsort((problem.first, -size, np.where(length < least, 0, -length)))


class _Shelf:
    """The buffers that lie already, from the lowest up."""

    def __init__(self, problem: Problem, placed: np.ndarray, offsets: np.ndarray):
        self.problem, self.count = problem, len(placed)
        order = placed[offsets[placed].argsort(kind="stable")]
        top = offsets + problem.size
        # Room for all; what is behind `count` is not there yet.
        rest = np.zeros(len(offsets) - len(placed), np.int64)
        self.first, self.end, self.low, self.top = (
            np.concatenate([column[order], rest])
            for column in (problem.first, problem.end, offsets, top)
        )

    def place(self, buffer: int) -> int:
        """Puts a buffer into the tightest gap that takes it; its offset."""
        problem, count = self.problem, self.count
        first, end = problem.first[buffer], problem.end[buffer]
        size = problem.size[buffer]
        beside = (self.first[:count] < end) & (self.end[:count] > first)
        low, top = self.low[:count][beside], self.top[:count][beside]
        offset = _tightest(low, np.maximum.accumulate(top), size) if len(low) else 0
        self._insert(first, end, offset, offset + size)
        return offset

    def _insert(self, *row: int) -> None:
        at = int(self.low[: self.count].searchsorted(row[2]))
        for column, value in zip(
            (self.first, self.end, self.low, self.top), row, strict=True
        ):
            column[at + 1 : self.count + 1] = column[at : self.count]
            column[at] = value
        self.count += 1


def _tightest(low: np.ndarray, top: np.ndarray, size: int) -> int:
    """The beginning of the smallest gap of at least `size`, else the top of all."""
    begins = np.concatenate([[0], top[:-1]])
    gaps = low - begins
    gaps[gaps < size] = np.iinfo(np.int64).max
    best = int(gaps.argmin())
    return int(begins[best] if low[best] - begins[best] >= size else top[-1])
