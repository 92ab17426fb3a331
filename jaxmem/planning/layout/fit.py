"""Best fit: buffers one after another, each into the tightest gap that takes it.

XLA lays out twice by best fit, in the order of falling size and in that of falling
lifetime, and keeps the lower layout (`GlobalDecreasingSizeBestFitHeap`). ROAM
(https://arxiv.org/abs/2310.19295, section 3.4) puts what lives long, a training step's
kept activations, at the bottom first: their lifetimes are nested, so they stack without
a gap, and the short-lived fill what is above. `orders` has both, and what lies between:
long-lived ones first, for several meanings of long.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from jaxmem.planning.layout.problem import LayoutProblem


def best_fit(
    problem: LayoutProblem,
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
    shelf, result = _PlacedRectangles(problem, placed, offsets), offsets.copy()
    for buffer in order.tolist():
        result[buffer] = shelf.place(buffer)
    return result


def simple_order(problem: LayoutProblem, by: Literal["size", "lifetime"]) -> np.ndarray:
    """The order of `best_fit`: the largest first, or what lives longest."""
    keys = -problem.life, -problem.size
    keys = keys if by == "size" else keys[::-1]
    return np.lexsort((problem.first, *keys))


def orders(problem: LayoutProblem, early: np.ndarray) -> Iterator[np.ndarray]:
    """Orders that do well on training steps, each once; XLA's two among the first.

    Args:
      problem: the buffers.
      early: true for those to be placed before all others.
    """
    known: set[bytes] = set()
    for order in _orders(problem, early):
        if order.tobytes() not in known:
            known.add(order.tobytes())
            yield order


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
    """The pieces that lie already, from the lowest up."""

    def __init__(self, problem: LayoutProblem, placed: np.ndarray, offsets: np.ndarray):
        self.problem, pieces = problem, problem.pieces
        lying = np.zeros(len(problem.size), bool)
        lying[placed] = True
        rows = np.flatnonzero(lying[pieces.owner])
        low = offsets[pieces.owner] + pieces.low
        top = offsets[pieces.owner] + pieces.high
        rows, self.count = rows[low[rows].argsort(kind="stable")], len(rows)
        # Room for all; what is behind `count` is not there yet.
        rest = np.zeros(len(pieces.owner) - len(rows), np.int64)
        self.first, self.end, self.low, self.top = (
            np.concatenate([column[rows], rest])
            for column in (pieces.first, pieces.end, low, top)
        )
        self._pieces = list(
            zip(*(column.tolist() for column in pieces[1:]), strict=True)
        )
        self._start = problem.start.tolist()

    def place(self, buffer: int) -> int:
        """Puts a buffer into the tightest gap that takes it; its offset."""
        problem = self.problem
        mine = self._pieces[self._start[buffer] : self._start[buffer + 1]]
        below, top = self._forbidden(mine)
        floor, alignment = int(problem.floor[buffer]), int(problem.alignment[buffer])
        offset = tightest(below, top, floor, alignment)
        for first, end, low, high in mine:
            self._insert(first, end, offset + low, offset + high)
        return offset

    def _forbidden(self, pieces) -> tuple[np.ndarray, np.ndarray]:
        """Ranges between which an offset would overlap, by rising beginning."""
        count, found = self.count, []
        for first, end, low, high in pieces:
            beside = (self.first[:count] < end) & (self.end[:count] > first)
            below = self.low[:count][beside] - high
            found.append((below, self.top[:count][beside] - low))
        if len(found) == 1:
            return found[0]
        below, top = (np.concatenate(x) for x in zip(*found, strict=True))
        order = below.argsort(kind="stable")
        return below[order], top[order]

    def _insert(self, *row: int) -> None:
        at = int(self.low[: self.count].searchsorted(row[2]))
        for column, value in zip(
            (self.first, self.end, self.low, self.top), row, strict=True
        ):
            column[at + 1 : self.count + 1] = column[at : self.count]
            column[at] = value
        self.count += 1


def tightest(
    below: np.ndarray, top: np.ndarray, floor: int, alignment: int, most: int = 2**62
) -> int:
    """The lowest offset of the smallest gap; -1 if there is none.

    Args:
      below, top: ranges in which no offset may be, ends excluded, by rising beginning.
      floor: the least offset, aligned.
      alignment: of which it must be a multiple.
      most: the largest offset; without it there is always one, on top of all.
    """
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
