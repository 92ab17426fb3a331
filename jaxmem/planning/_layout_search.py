"""Exact search for a layout within a capacity.

Any layout can be pushed down until each buffer lies on the ground or on another, so it
is enough to look for such ones. The state of the search is, for each buffer that does
not lie yet, the least offset at which it still can: its *floor*, the top of what lies
below it. A step takes a section of time, whose lowest floor some buffers have in common,
and asks which of them lies there: each in turn, or none, which leaves a hole. It takes
the section with the fewest answers, as long as nothing else fits below them; so most
steps are forced moves. A state is dropped as soon as a section cannot hold what is still
to come above its lowest floor. (Cutting by sections and pushing down is what minimalloc
does too, doi 10.1145/3623278.3624752; it places in the order of offsets, and so decides
where there is most to choose from.)

Such searches end quickly or not at all. So one is given up after some dead ends and
begun again with other preferences, and sections in which searches died count more in
the next ones.

Not optimal: floors come from below only, and two sections are never looked at together.
"""

import time
from typing import NamedTuple

import numpy as np

from jaxmem.planning._layout_problem import Problem


class GaveUp(Exception):
    """The search came to its limit before its end."""


class _State(NamedTuple):
    """What is known after some decisions."""

    placed: int  # buffers that lie
    floor: np.ndarray  # of each buffer; `capacity` for those that lie
    left: np.ndarray  # what is still to come in each section
    low: np.ndarray  # the least floor in each section
    ties: np.ndarray  # how many buffers have it
    top: np.ndarray  # the least top that a buffer on its floor would have
    cross: np.ndarray | None = None
    

class Search:
    """Looks for layouts of one problem within one capacity, again and again.

    Attributes:
      capacity: in the problem's units.
      least: once a search has come to its end in vain, no layout is lower than this.
    """

    def __init__(self, problem: Problem, capacity: int, seed: int = 0):
        self.problem, self.capacity = problem, capacity
        self.least = np.iinfo(np.int64).max
        self._random = np.random.default_rng(seed)
        self._size = np.append(problem.size, 0)  # one more, to fill up `_members`
        self._members = _members(problem)
        self._beside = _beside(problem)
        self._twins = _twins(problem)
        self._weight = np.ones(len(problem.load))
        self._end = np.append(problem.end, 0)
        self.steps=0

    def run(
        self, dead_ends: float, deadline: float, noise: float = 0.0
    ) -> np.ndarray | None:
        """Searches once.

        Args:
          dead_ends: the number after which to give up.
          deadline: when to give up, in seconds of `time.monotonic`.
          noise: how much chance there is in which buffer is tried first: 0 is the
            largest, 1 is up to a factor of two between them.

        Returns:
          Offsets in units, or None if there is no layout within the capacity.

        Raises:
          GaveUp: at one of the limits.
        """
        rank = self._preferences(noise)
        offsets = np.zeros(len(self.problem.size), np.int64)
        waiting: list[tuple[_State, int]] = []
        failed = 0
        state = self._start()
        while state is None or state.placed < len(offsets):
            self.steps+=1
            if state is not None:
                buffer = self._choose(state, rank)
                waiting.append((state, buffer))
                offsets[buffer] = state.floor[buffer]
                state = self._place(state, buffer)
            elif waiting:
                failed += 1
                if failed > dead_ends or time.monotonic() > deadline:
                    raise GaveUp
                state = self._lift(*waiting.pop())
            else:
                return None
        return offsets

    def _preferences(self, noise):
        size = self.problem.size
        chance = 1 + noise * self._random.random(len(size))
        return (size * chance)[self._twins]

    def _start(self) -> _State | None:
        size, sections = self.problem.size, len(self.problem.load)
        floor = np.append(np.zeros_like(size), self.capacity)
        zeros = np.zeros(sections, np.int64)
        empty = _State(0, floor, self.problem.load, zeros, zeros, zeros)
        return self._seen(empty, slice(0, sections))

    def _choose(self, state: _State, rank: np.ndarray) -> int:
        """The buffer to place next, on its floor or, failing that, higher."""
        score = state.ties / self._weight
        score[state.left == 0] = np.inf
        while True:
            section = int(score.argmin())
            low = state.low[section]
            members = self._members[:, section]
            tied = members[state.floor[members] == low]
            if len(tied)==0: import pdb; pdb.set_trace()
            if all(
                state.top[self.problem.first[b] : self.problem.end[b]].min() > low
                for b in tied
            ):
                return int(tied[rank[tied].argmax()])
            score[section] = np.inf

    def _place(self, state: _State, buffer: int) -> _State | None:
        """The state with a buffer on its floor; None if it is a dead end."""
        first, end = self.problem.first[buffer], self.problem.end[buffer]
        floor, left = state.floor.copy(), state.left.copy()
        top = floor[buffer] + self._size[buffer]
        beside = self._beside[buffer]
        raised = beside[floor[beside] < top]
        floor[raised] = top
        floor[buffer] = self.capacity
        left[first:end] -= self._size[buffer]
        if len(raised):
            first = min(first, self.problem.first[raised].min())
            end = max(end, self.problem.end[raised].max())
        return self._seen(
            state._replace(placed=state.placed + 1, floor=floor, left=left),
            slice(first, end),
        )

    def _lift(self, state: _State, buffer: int) -> _State | None:
        """The state with a buffer, and its equals, above where it could lie.

        It then lies on one that does not lie yet.
        """
        floor = state.floor.copy()
        twins = np.flatnonzero(self._twins == self._twins[buffer])
        twins = twins[floor[twins] == floor[buffer]]
        beside = self._beside[buffer]
        beside = beside[self._twins[beside] != self._twins[buffer]]
        floor[twins] = (floor[beside] + self._size[beside]).min(initial=self.capacity)
        rows = slice(self.problem.first[buffer], self.problem.end[buffer])
        return self._seen(state._replace(floor=floor), rows)

    def _seen(self, state: _State, rows: slice) -> _State | None:
        """The state with its sections looked at; None if one cannot hold what comes."""
        members = self._members[:, rows]
        floors = state.floor[members]
        low = floors.min(axis=0)
        need = low + state.left[rows]
        most = need.max()
        if most > self.capacity:
            self.least = min(self.least, int(most))
            self._weight[rows][need > self.capacity] += 1
            return None
        columns = [
            (state.low, low),
            (state.ties, (floors == low).sum(axis=0)),
            (state.top, (floors + self._size[members]).min(axis=0)),
        ]
        changed = []
        for whole, part in columns:
            whole = whole.copy()
            whole[rows] = part
            changed.append(whole)
        return state._replace(low=changed[0], ties=changed[1], top=changed[2])


def _members(problem: Problem) -> np.ndarray:
    """(most, sections) buffers alive in each section, filled up with one too many."""
    count, sections = len(problem.size), len(problem.load)
    columns = [
        np.flatnonzero((problem.first <= s) & (problem.end > s))
        for s in range(sections)
    ]
    members = np.full((max(map(len, columns), default=0), sections), count)
    for section, column in enumerate(columns):
        members[: len(column), section] = column
    return members


def _beside(problem: Problem) -> list[np.ndarray]:
    """The buffers alive together with each."""
    found = []
    for buffer, (first, end) in enumerate(
        zip(problem.first, problem.end, strict=True)
    ):
        together = (problem.first < end) & (problem.end > first)
        together[buffer] = False
        found.append(np.flatnonzero(together))
    return found


def _twins(problem: Problem) -> np.ndarray:
    """The first buffer with the same lifetime and size as each."""
    same = np.stack([problem.first, problem.end, problem.size])
    _, first, inverse = np.unique(
        same, axis=1, return_index=True, return_inverse=True
    )
    return first[inverse.reshape(-1)]
