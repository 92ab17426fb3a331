"""The cheapest persistent schedules of a chain of blocks, for every amount of memory.

A *run* of blocks i to j - 1 is to go backward, its last block first, while what crosses
its beginning stays in memory. Either its first block is done and keeps some of its own
values until it goes backward itself (F_all, or a part of that), and the run without it
follows. Or blocks i to s - 1 are done and keep nothing (F_none) but what crosses the
beginning of block s (F_ck): the run from s on goes backward, then the one from i to s
is recomputed. Persistent means that a checkpoint stays until its own block has gone
backward.

What crosses the beginning of s is there when the run from s on has gone backward, and
the last block of the run from i to s need not make it a second time: such a run is
*given* it, if that pays.

For each run there is the whole Pareto front of bytes and cost: no unit of memory is
chosen beforehand, and one table serves every budget. A front with more than `POINTS`
points is thinned, which loses less than the step between two of them; so this is
optimal among persistent schedules of these blocks up to that, as far as the bytes
stated for the blocks are right.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for
heterogeneous chains" (https://arxiv.org/abs/1911.13214), section 4; the fronts in the
place of memory slots, the choice of what a block keeps, and runs that are given what
crosses their end are added.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

POINTS = 1200  # of a front of a run
ALIKE = 1e-9  # costs that differ by a smaller part are the same


@dataclass(frozen=True)
class OptionFigures:
    """One way to do a block such that it keeps some of its values.

    Attributes:
      held: bytes kept, beside what crosses the beginning of the next block.
      need: bytes while the block is done so, beside what crosses its own beginning.
      cost: of recomputing the rest when the block goes backward.
    """

    held: float
    need: float
    cost: float


@dataclass(frozen=True)
class ChainFigures:
    """A chain of n blocks; all figures are bytes, but for costs.

    Attributes:
      forward: (n, n); while block k is done in a sweep from the beginning of block i
        that keeps nothing, beyond what crosses the beginning of i.
      crossing: (n, n + 1); what crosses the beginning of s beyond what crosses that of
        i; nothing crosses n.
      resting: (n + 1,); what the backward pass has in memory, beside values of earlier
        blocks, when it comes to block j - 1.
      backward: (n,); while a block goes backward with its own values all there, beyond
        what crosses its beginning.
      whole: (n,); while a block is recomputed with all that its backward pass reads.
      cost: (n,); of doing a block.
      remainder: (n,); of recomputing what its backward pass reads when what crosses its
        end is there.
      keeping: ways to do each block; some keep all that its backward pass reads.
    """

    forward: np.ndarray
    crossing: np.ndarray
    resting: np.ndarray
    backward: np.ndarray
    whole: np.ndarray
    cost: np.ndarray
    remainder: np.ndarray
    keeping: Sequence[Sequence[OptionFigures]]


class BackwardStep(NamedTuple):
    """What is in memory for a block when it goes backward.

    Attributes:
      block: the block.
      crossings: blocks whose crossing values have been kept.
      keepings: (block, number of the `OptionFigures` by which it was done).
    """

    block: int
    crossings: tuple[int, ...]
    keepings: tuple[tuple[int, int], ...]


class _SavedValues(NamedTuple):
    """What a run keeps: what crosses the beginning of a block, or some of its values.

    Attributes:
      block: the block.
      keeping: the number of its `OptionFigures`; None for what crosses its beginning.
      until: the end of the run.
    """

    block: int
    keeping: int | None
    until: int


class _RunFront(NamedTuple):
    """Bytes, rising; the cost that they allow, falling; what to do first.

    A choice below 0 is -1 - k, `OptionFigures` k of the first block; others are a block s,
    from which the run is split. In `given` is whether it is a run that is given what
    crosses its end.
    """

    bytes: np.ndarray
    cost: np.ndarray
    choice: np.ndarray
    given: np.ndarray

    def at(self, size: float) -> int:
        """The number of the last point within so many bytes, -1 if there is none."""
        return int(np.searchsorted(self.bytes, size, "right")) - 1


class _FrontRow:
    """The fronts of the runs with one beginning, or with one end, one after another.

    Attributes:
      bytes, cost: of all their points.
      which: the place of each point's front in the row.
      start: where each front begins.
    """

    def __init__(self):
        self.bytes, self.cost = np.zeros(0), np.zeros(0)
        self.which, self.start = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def append(self, front: _RunFront) -> None:
        place = np.full(len(front.bytes), len(self.start))
        self.start = np.append(self.start, len(self.bytes))
        self.bytes = np.concatenate([self.bytes, front.bytes])
        self.cost = np.concatenate([self.cost, front.cost])
        self.which = np.concatenate([self.which, place])


class ChainSchedules:
    """The schedules of all blocks of a chain.

    Args:
      stages: the chain.
      most: bytes; schedules that take more are left out.

    Attributes:
      bytes: of each schedule, rising.
      cost: of all that is done in the forward pass and recomputed, falling.
    """

    def __init__(self, stages: ChainFigures, most: float = np.inf):
        self._stages, self._most = stages, most
        count = self._count = len(stages.cost)
        self._before = np.concatenate([[0.0], np.cumsum(stages.cost)])
        self._fronts: dict[tuple[int, int, bool], _RunFront] = {}
        self._left: dict[tuple[int, int], _RunFront] = {}
        self._lefts = [_FrontRow() for _ in range(count)]
        # By end, and whether it is given what crosses there; later beginnings first.
        self._rights = [(_FrontRow(), _FrontRow()) for _ in range(count + 1)]
        for length in range(1, count + 1):
            for i in range(count - length + 1):
                self._fill(i, i + length)
        self.bytes, self.cost, *_ = self._fronts[0, count, False]

    def _fill(self, i: int, j: int) -> None:
        found = []
        for given in (False, True)[: 1 + (j < self._count)]:
            front = self._single(i, given) if j == i + 1 else self._run(i, j, given)
            self._fronts[i, j, given] = front
            self._rights[j][given].append(front)
            found.append(front)
        both = [np.concatenate(parts) for parts in zip(*found, strict=True)]
        self._left[i, j] = _pareto(*both)
        self._lefts[i].append(self._left[i, j])

    def _single(self, i: int, given: bool) -> _RunFront:
        stages, need = self._stages, self._stages.backward[i]
        cost = stages.remainder[i] if given else stages.cost[i]
        if not given or cost > 0:
            need = max(need, stages.whole[i] + self._resting(i, i + 1, given))
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
        """Bytes there all the time, beyond what crosses the beginning of i."""
        stages = self._stages
        return stages.resting[j] + (stages.crossing[i, j] if given else 0.0)

    def _kept(self, i: int, j: int, given: bool):
        """Bytes, costs and choices where the first block keeps some of its values."""
        stages, rest = self._stages, self._resting(i, j, given)
        right = self._fronts[i + 1, j, given]
        for k, keeping in enumerate(stages.keeping[i]):
            need = max(keeping.need + rest, stages.backward[i])
            if keeping.cost > 0:
                need = max(need, stages.whole[i] + stages.resting[i + 1])
            size = right.bytes + (keeping.held + stages.crossing[i, i + 1])
            cost = right.cost + (stages.cost[i] + keeping.cost)
            yield np.maximum(size, need), cost, np.full(len(size), -1 - k)

    def _split(self, i: int, j: int, given: bool):
        """The same where a sweep to block s keeps nothing but what crosses there.

        At every step of either side, for all s at once: what the other one costs within
        as many bytes.
        """
        stages, rest = self._stages, self._resting(i, j, given)
        right, left = self._rights[j][given], self._lefts[i]
        sweep = np.maximum.accumulate(stages.forward[i, i : j - 1])
        # By the place in the row of rights, where the beginning j - 1 comes first.
        least = (np.maximum(sweep, 0.0) + rest)[::-1]
        held = stages.crossing[i, i + 1 : j][::-1]
        recomputable = (self._before[i + 1 : j] - self._before[i])[::-1]
        size = np.maximum(right.bytes + held[right.which], least[right.which])
        cost = right.cost + recomputable[right.which]
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
        """What is there when each block begins to go backward, the last block first.

        What a run keeps is made in the sweep of its last block, so it is there when the
        blocks before that one begin; but for the first forward pass, which comes before
        all of them.

        Args:
          point: the number of the schedule in `bytes`.
        """
        found, size = [], float(self.bytes[point])
        # Runs still to go backward, the next one last, and what is kept meanwhile.
        waiting: list[tuple[int, int, float, bool, tuple[_SavedValues, ...]]]
        waiting = [(0, self._count, size, False, ())]
        while waiting:
            i, j, size, given, kept = waiting.pop()
            if j == i + 1:
                found.append(self._step(i, kept, given))
                continue
            front = self._fronts[i, j, given]
            s, rest = int(front.choice[front.at(size)]), False
            if s < 0:
                keeping, s = -1 - s, i + 1
                held = self._stages.keeping[i][keeping].held
                kept = (*kept, _SavedValues(i, keeping, j))
            else:
                left, held = self._left[i, s], 0.0
                rest = bool(left.given[left.at(size)])
            held += self._stages.crossing[i, s]
            waiting.append((i, s, size, rest, kept))
            waiting.append(
                (s, j, size - held, given, (*kept, _SavedValues(s, None, j)))
            )
        return found

    def _step(
        self, block: int, kept: Sequence[_SavedValues], given: bool
    ) -> BackwardStep:
        made = [k for k in kept if k.until > block + 1 or k.until == self._count]
        crossings = [k.block for k in made if k.keeping is None]
        keepings = [(k.block, k.keeping) for k in made if k.keeping is not None]
        return BackwardStep(
            block,
            (*crossings, block + 1) if given else tuple(crossings),
            tuple(keepings),
        )


def _within(row: _FrontRow, size: np.ndarray, which: np.ndarray, most: np.ndarray):
    """The last point of a front of the row that takes no more; -1 if there is none.

    Args:
      row: fronts.
      size: bytes of their points, rising in each front.
      which: the place of the front, for each question.
      most: bytes, for each question.
    """
    apart = 1 + max(size.max(initial=0.0), most.max(initial=0.0))
    keys = row.which * apart + size
    found = np.searchsorted(keys, which * apart + most, "right") - 1
    return np.where(found >= row.start[which], found, -1)


def _pareto(size, cost, choice, given) -> _RunFront:
    """The points that no other beats, by rising bytes."""
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
