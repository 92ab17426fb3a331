"""The cheapest persistent schedules of a chain of blocks, for every amount of memory.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for
heterogeneous chains" (https://arxiv.org/abs/1911.13214), section 4. Added are fronts in
the place of memory slots, the choice of what a block keeps, and runs that are given
what crosses their end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

POINTS = 1200  # of the front of a run: thinning loses less than one of their steps
ALIKE = 1e-9  # relative: costs that differ by less are the same, up to rounding


@dataclass(frozen=True)
class OptionFigures:
    """The figures of one option of what a block keeps (`BlockOption`)."""

    held: float  # bytes kept, beside what crosses the beginning of the next block
    need: float  # bytes while the block runs so, beside what crosses its own beginning
    cost: float  # of recomputing the rest when the block goes backward


@dataclass(frozen=True)
class ChainFigures:
    """The figures of a chain of n blocks: bytes, except for costs."""

    # (n, n) bytes while block k runs in a sweep from the beginning of block i that
    # keeps nothing, beyond what crosses the beginning of i
    forward: np.ndarray
    # (n, n + 1) bytes that cross the beginning of s, not that of i; nothing crosses n
    crossing: np.ndarray
    # (n + 1,) bytes that the backward pass has in memory, beside values of earlier
    # blocks, when it comes to block j - 1
    resting: np.ndarray
    # (n,) bytes while a block goes backward with all of its own values in memory,
    # beyond what crosses its beginning
    backward: np.ndarray
    # (n,) bytes while a block is recomputed with all that its backward pass reads
    whole: np.ndarray
    cost: np.ndarray  # (n,) of running a block
    # (n,) cost of recomputing what its backward pass reads when what crosses its end is
    # in memory
    remainder: np.ndarray
    # Of each block; some keep all that its backward pass reads
    options: Sequence[Sequence[OptionFigures]]


class BackwardStep(NamedTuple):
    """What is in memory when a block goes backward."""

    block: int
    crossings: tuple[int, ...]  # blocks whose beginning's values are in memory
    options: tuple[tuple[int, int], ...]  # (block, option) of what blocks keep


class _SavedValues(NamedTuple):
    """Values that a run keeps: those crossing a block's beginning, or its own."""

    block: int
    option: int | None  # the number of its option; None for what crosses its beginning
    end: int  # the end of the run


class _RunFront(NamedTuple):
    """The Pareto front of a run: bytes, rising; cost, falling; and the first choice."""

    bytes: np.ndarray
    cost: np.ndarray
    # -1 - k for option k of the first block, else the block s at which it is split
    choice: np.ndarray
    given: np.ndarray  # whether the run is given what crosses its end

    def at(self, size: float) -> int:
        """The number of the last point within so many bytes, -1 if there is none."""
        return int(np.searchsorted(self.bytes, size, "right")) - 1


class _FrontRow:
    """The concatenated fronts of the runs with the same beginning, or the same end."""

    def __init__(self):
        self.bytes, self.cost = np.zeros(0), np.zeros(0)  # of all points
        self.which = np.zeros(0, np.int64)  # the number of each point's front
        self.start = np.zeros(0, np.int64)  # the first point of each front

    def append(self, front: _RunFront) -> None:
        place = np.full(len(front.bytes), len(self.start))
        self.start = np.append(self.start, len(self.bytes))
        self.bytes = np.concatenate([self.bytes, front.bytes])
        self.cost = np.concatenate([self.cost, front.cost])
        self.which = np.concatenate([self.which, place])


class ChainSchedules:
    """The Pareto front of schedules of a chain, optimal among persistent ones."""

    # A run of blocks i to j - 1 goes backward, its last block first, while what crosses
    # its beginning stays in memory. Persistent means that a checkpoint stays until its
    # own block has gone backward. Each run has its whole front of bytes and cost, so
    # that one table serves every budget and no unit of memory is chosen beforehand.

    def __init__(self, figures: ChainFigures, most: float = np.inf):
        self._figures, self._most = figures, most
        count = self._count = len(figures.cost)
        self._before = np.concatenate([[0.0], np.cumsum(figures.cost)])
        self._fronts: dict[tuple[int, int, bool], _RunFront] = {}
        self._left: dict[tuple[int, int], _RunFront] = {}
        self._lefts = [_FrontRow() for _ in range(count)]
        # By end, and whether it is given what crosses there; later beginnings first.
        self._rights = [(_FrontRow(), _FrontRow()) for _ in range(count + 1)]
        for length in range(1, count + 1):
            for i in range(count - length + 1):
                self._fill(i, i + length)
        # Bytes, rising, and the cost of the forward pass and all recomputation.
        self.bytes, self.cost, *_ = self._fronts[0, count, False]

    def _fill(self, i: int, j: int) -> None:
        found = []
        # What crosses the end of a run is still in memory when the run after it has
        # gone backward, so its last block need not make that a second time: the run is
        # given it, if that pays.
        for given in (False, True)[: 1 + (j < self._count)]:
            front = self._single(i, given) if j == i + 1 else self._run(i, j, given)
            self._fronts[i, j, given] = front
            self._rights[j][given].append(front)
            found.append(front)
        both = [np.concatenate(parts) for parts in zip(*found, strict=True)]
        self._left[i, j] = _pareto(*both)
        self._lefts[i].append(self._left[i, j])

    def _single(self, i: int, given: bool) -> _RunFront:
        figures, need = self._figures, self._figures.backward[i]
        cost = figures.remainder[i] if given else figures.cost[i]
        if not given or cost > 0:
            need = max(need, figures.whole[i] + self._resting(i, i + 1, given))
        inside = int(need <= self._most)
        row = (np.array([x])[:inside] for x in (float(need), float(cost), -1, given))
        return _RunFront(*row)

    def _run(self, i: int, j: int, given: bool) -> _RunFront:
        """The front of a run of several blocks."""
        parts = [*self._kept(i, j, given), self._split(i, j, given)]
        size, cost, choice = (np.concatenate(c) for c in zip(*parts, strict=True))
        some = np.flatnonzero(size <= self._most)
        where = np.full(len(some), given)
        front = _pareto(size[some], cost[some], choice[some], where)
        return _thinned(front) if j - i < self._count else front

    def _resting(self, i: int, j: int, given: bool) -> float:
        """Bytes alive all the time, beyond what crosses the beginning of i."""
        figures = self._figures
        return figures.resting[j] + (figures.crossing[i, j] if given else 0.0)

    def _kept(self, i: int, j: int, given: bool):
        """Bytes, costs and choices if the first block keeps some of its values."""
        # The block is F_all in the paper, or a part of it; the run without it follows.
        figures, rest = self._figures, self._resting(i, j, given)
        right = self._fronts[i + 1, j, given]
        for k, option in enumerate(figures.options[i]):
            need = max(option.need + rest, figures.backward[i])
            if option.cost > 0:
                need = max(need, figures.whole[i] + figures.resting[i + 1])
            size = right.bytes + (option.held + figures.crossing[i, i + 1])
            cost = right.cost + (figures.cost[i] + option.cost)
            yield np.maximum(size, need), cost, np.full(len(size), -1 - k)

    def _split(self, i: int, j: int, given: bool):
        """The same if a sweep to block s keeps nothing but what crosses there."""
        # Blocks i to s - 1 are F_none in the paper, and s is F_ck. For each point of
        # either side, and all s at once, this takes the least cost of the other side
        # within as many bytes.
        figures, rest = self._figures, self._resting(i, j, given)
        right, left = self._rights[j][given], self._lefts[i]
        sweep = np.maximum.accumulate(figures.forward[i, i : j - 1])
        # By the place in the row of rights, where the beginning j - 1 comes first.
        least = (np.maximum(sweep, 0.0) + rest)[::-1]
        held = figures.crossing[i, i + 1 : j][::-1]
        sweep_cost = (self._before[i + 1 : j] - self._before[i])[::-1]
        size = np.maximum(right.bytes + held[right.which], least[right.which])
        cost = right.cost + sweep_cost[right.which]
        last = j - i - 2
        of_left = _within(left, left.bytes, last - right.which, size)
        of_right = _within(right, size, last - left.which, left.bytes)
        a, b = np.flatnonzero(of_left >= 0), np.flatnonzero(of_right >= 0)
        return (
            np.concatenate([size[a], left.bytes[b]]),
            np.concatenate(
                [cost[a] + left.cost[of_left[a]], cost[of_right[b]] + left.cost[b]]
            ),
            np.concatenate([j - 1 - right.which[a], i + 1 + left.which[b]]),
        )

    def plan(self, point: int) -> list[BackwardStep]:
        """What is in memory when each block goes backward, the last block first."""
        # What a run keeps is made in the sweep to its last block, so it is in memory
        # for the blocks before that one; except in the first forward pass, which comes
        # before all of them.
        steps, size = [], float(self.bytes[point])
        # Runs still to go backward, the next one last, and what is kept meanwhile.
        waiting: list[tuple[int, int, float, bool, tuple[_SavedValues, ...]]]
        waiting = [(0, self._count, size, False, ())]
        while waiting:
            i, j, size, given, kept = waiting.pop()
            if j == i + 1:
                steps.append(self._step(i, kept, given))
                continue
            front = self._fronts[i, j, given]
            s, rest = int(front.choice[front.at(size)]), False
            if s < 0:
                option, s = -1 - s, i + 1
                held = self._figures.options[i][option].held
                kept = (*kept, _SavedValues(i, option, j))
            else:
                left, held = self._left[i, s], 0.0
                rest = bool(left.given[left.at(size)])
            held += self._figures.crossing[i, s]
            waiting.append((i, s, size, rest, kept))
            waiting.append(
                (s, j, size - held, given, (*kept, _SavedValues(s, None, j)))
            )
        return steps

    def _step(
        self, block: int, kept: Sequence[_SavedValues], given: bool
    ) -> BackwardStep:
        made = [k for k in kept if k.end > block + 1 or k.end == self._count]
        crossings = [k.block for k in made if k.option is None]
        options = [(k.block, k.option) for k in made if k.option is not None]
        return BackwardStep(
            block,
            (*crossings, block + 1) if given else tuple(crossings),
            tuple(options),
        )


def _within(row: _FrontRow, size: np.ndarray, which: np.ndarray, most: np.ndarray):
    """The last point within `most` bytes in each front `which`; -1 if there is none."""
    # One sorted array serves all fronts, since their keys do not overlap.
    apart = 1 + max(size.max(initial=0.0), most.max(initial=0.0))
    keys = row.which * apart + size
    at = np.searchsorted(keys, which * apart + most, "right") - 1
    return np.where(at >= row.start[which], at, -1)


def _pareto(size, cost, choice, given) -> _RunFront:
    """The points that no other dominates, by rising bytes."""
    order = np.argsort(size, kind="stable")
    size, cost = size[order], cost[order]
    better = np.ones(len(order), bool)
    # Sums of the same costs in another order do not count as less.
    better[1:] = cost[1:] < np.minimum.accumulate(cost)[:-1] * (1 - ALIKE)
    order, size, cost = order[better], size[better], cost[better]
    last = np.append(size[1:] > size[:-1], True)[: len(size)]  # of as many bytes
    return _RunFront(size[last], cost[last], choice[order][last], given[order][last])


def _thinned(front: _RunFront) -> _RunFront:
    """At most `POINTS` points, at about equal ratios of bytes, with both ends."""
    if len(front.bytes) <= POINTS:
        return front
    ends = np.geomspace(max(front.bytes[0], 1.0), front.bytes[-1], POINTS)
    chosen = np.unique(np.searchsorted(front.bytes, ends, "right") - 1)
    chosen[-1] = len(front.bytes) - 1
    return _RunFront(*(column[chosen] for column in front))
