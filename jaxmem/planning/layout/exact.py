"""Exact search for a layout within a capacity.

Any layout can be pushed down until each buffer lies on the ground or on another one, so
it is enough to search for such layouts. Source: minimalloc (doi
10.1145/3623278.3624752) cuts by sections and pushes down too; it places buffers in the
order of offsets, this search where there is least choice.
"""

import time
from typing import NamedTuple

import numpy as np

from jaxmem.planning.layout.problem import LayoutProblem

_LEAP = 4  # decisions that are undone, about, when a search is first stuck


class SearchStopped(Exception):
    """The search reached a limit before its end."""


class LayoutSearchOptions(NamedTuple):
    """Options of one search."""

    dead_ends: float  # without another buffer placed, after which decisions are undone
    chance: float = 0.0  # of another buffer than the largest: 1 doubles sizes at most
    long: float = 0.0  # exponent of the life, by which sizes are multiplied for ranks
    full: bool = False  # begin where memory is nearly full, not where searches failed
    whole: bool = False  # stop instead of undoing: only then it proves that none fits


class _LayoutState(NamedTuple):
    """The state after some decisions."""

    placed: int  # number of buffers placed
    floor: np.ndarray  # least offset of each, above what lies below; capacity if placed
    left: np.ndarray  # units of unplaced buffers in each section
    low: np.ndarray  # least floor in each section
    ties: np.ndarray  # number of buffers that have it
    top: np.ndarray  # least top that an unplaced buffer on its floor would have


class LayoutSearch:
    """Searches for layouts of one problem, as often as it is called."""

    def __init__(self, problem: LayoutProblem, seed: int = 0):
        self._problem = problem
        self._random = np.random.default_rng(seed)
        self._size = np.append(problem.size, 0)  # one more, which pads `_members`
        self._sections = _sections_of(problem)
        self._members = _members(self._sections, len(problem.load))
        self._load = self._size[self._members].sum(axis=0)
        self._beside = _beside(problem)
        self._alike = _alike(problem)
        self._aligned = bool((problem.alignment > 1).any())
        self._deaths = np.ones(len(problem.load))
        self.least = 0  # no layout is lower, if the last search ended without one

    def run(
        self, capacity: int, options: LayoutSearchOptions, deadline: float
    ) -> np.ndarray | None:
        """Offsets within the capacity, or None if there are none, proven."""
        self._capacity, self.least = capacity, np.iinfo(np.int64).max
        rank, weight = self._preferences(options)
        offsets = np.zeros(len(self._problem.size), np.int64)
        # Decisions whose contrary is to come.
        waiting: list[tuple[_LayoutState, int]] = []
        dead_ends, farthest, leap, leapt = 0, 0, _LEAP, False
        state = self._start()
        while state is None or state.placed < len(offsets):
            if time.monotonic() > deadline:
                raise SearchStopped
            if state is not None:
                if state.placed > farthest:
                    dead_ends, farthest, leap = 0, state.placed, _LEAP
                buffer = self._choose(state, rank, weight)
                waiting.append((state, buffer))
                offsets[buffer] = state.floor[buffer]
                state = self._place(state, buffer)
                continue
            # Such searches end soon or not at all. So after some dead ends without
            # progress a number of decisions is undone, twice as many each time.
            dead_ends += 1
            if dead_ends > options.dead_ends:
                if options.whole:
                    raise SearchStopped
                back = round(leap * self._random.uniform(0.5, 1.5))
                if back >= len(waiting):
                    raise SearchStopped
                del waiting[-back:]
                dead_ends, leap, leapt = 0, 2 * leap, True
                rank, weight = self._preferences(options)
            if not waiting:
                if leapt:
                    raise SearchStopped
                return None
            state = self._lift(*waiting.pop())
        return offsets

    def _preferences(self, options: LayoutSearchOptions):
        """The rank of each buffer and the weight of each section: high ones first."""
        size = self._problem.size * self._problem.length**options.long
        rank = size * (1 + options.chance * self._random.random(len(size)))
        room = np.maximum(1 - self._load / self._capacity, 0.0)
        weight = 1 / (0.02 + room) if options.full else self._deaths
        return rank[self._alike], weight

    def _start(self) -> _LayoutState | None:
        problem, load = self._problem, self._load
        every = np.arange(len(problem.size))
        floor = np.append(problem.raised(problem.floor, every), self._capacity)
        nothing = np.zeros_like(load)
        empty = _LayoutState(0, floor, load, nothing, nothing, nothing)
        return self._seen(empty, slice(0, len(load)))

    def _choose(self, state: _LayoutState, rank: np.ndarray, weight: np.ndarray) -> int:
        """The buffer to place next, on its floor or, failing that, higher."""
        # In the section with the fewest choices, so that most steps are forced.
        problem = self._problem
        score = state.ties / weight
        score[state.left == 0] = np.inf
        # The loop ends: nothing fits below the lowest floor of all sections.
        while True:
            section = int(score.argmin())
            low, members = state.low[section], self._members[:, section]
            tied = members[state.floor[members] == low]
            if all(
                state.top[problem.first[b] : problem.end[b]].min() > low for b in tied
            ):
                return int(tied[rank[tied].argmax()])
            score[section] = np.inf

    def _place(self, state: _LayoutState, buffer: int) -> _LayoutState | None:
        """The state with a buffer on its floor; None if it is a dead end."""
        first, end = self._problem.first[buffer], self._problem.end[buffer]
        floor, left = state.floor.copy(), state.left.copy()
        top = floor[buffer] + self._size[buffer]
        beside = self._beside[buffer]
        raised = beside[floor[beside] < top]
        floor[raised] = self._raised(top, raised)
        floor[buffer] = self._capacity
        left[self._sections[buffer]] -= self._size[buffer]
        if len(raised):
            first = min(first, self._problem.first[raised].min())
            end = max(end, self._problem.end[raised].max())
        placed = state._replace(placed=state.placed + 1, floor=floor, left=left)
        return self._seen(placed, slice(first, end))

    def _lift(self, state: _LayoutState, buffer: int) -> _LayoutState | None:
        """The state in which a buffer, and those like it, lie above their floor."""
        # They then lie on a buffer that is not placed yet.
        floor, alike = state.floor.copy(), self._alike
        same = np.flatnonzero((alike == alike[buffer]) & (floor[:-1] == floor[buffer]))
        beside = self._beside[buffer]
        beside = beside[alike[beside] != alike[buffer]]
        tops = floor[beside] + self._size[beside]
        least = self._raised(tops.min(initial=self._capacity), buffer)
        floor[same] = np.minimum(least, self._capacity)
        sections = slice(self._problem.first[buffer], self._problem.end[buffer])
        return self._seen(state._replace(floor=floor), sections)

    def _raised(self, offset, buffers):
        return self._problem.raised(offset, buffers) if self._aligned else offset

    def _seen(self, state: _LayoutState, sections: slice) -> _LayoutState | None:
        """The state with these sections updated; None if one of them is overfull."""
        members = self._members[:, sections]
        floors = state.floor[members]
        low = floors.min(axis=0)
        need = low + state.left[sections]
        most = int(need.max(initial=0))
        if most > self._capacity:
            self.least = min(self.least, most)
            self._deaths[sections][need > self._capacity] += 1
            return None
        ties = (floors == low).sum(axis=0)
        top = (floors + self._size[members]).min(axis=0)
        return state._replace(
            low=_with(state.low, sections, low),
            ties=_with(state.ties, sections, ties),
            top=_with(state.top, sections, top),
        )


def _with(whole: np.ndarray, where: slice, part: np.ndarray) -> np.ndarray:
    whole = whole.copy()
    whole[where] = part
    return whole


def _sections_of(problem: LayoutProblem) -> list[np.ndarray]:
    """The sections in which each buffer is alive."""
    rectangles = problem.rectangles
    each = list(map(np.arange, rectangles.first, rectangles.end))
    starts = problem.start.tolist()
    return [
        each[a] if b == a + 1 else np.concatenate(each[a:b])
        for a, b in zip(starts, starts[1:], strict=False)
    ]


def _members(sections: list[np.ndarray], count: int) -> np.ndarray:
    """(most, sections) buffers alive in each section, padded with their number."""
    buffers: list[list[int]] = [[] for _ in range(count)]
    for buffer, alive in enumerate(sections):
        for section in alive.tolist():
            buffers[section].append(buffer)
    members = np.full((max(map(len, buffers), default=0), count), len(sections))
    for section, alive in enumerate(buffers):
        members[: len(alive), section] = alive
    return members


def _beside(problem: LayoutProblem) -> list[np.ndarray]:
    """The buffers alive together with each."""
    rectangles, starts, beside = problem.rectangles, problem.start.tolist(), []
    for buffer, (a, b) in enumerate(zip(starts, starts[1:], strict=False)):
        together = np.zeros(len(problem.size), bool)
        for first, end in zip(rectangles.first[a:b], rectangles.end[a:b], strict=True):
            rows = (rectangles.first < end) & (rectangles.end > first)
            together[rectangles.owner[rows]] = True
        together[buffer] = False
        beside.append(np.flatnonzero(together))
    return beside


def _alike(problem: LayoutProblem) -> np.ndarray:
    """The first buffer of the same times, size, alignment and floor as each."""
    same: dict[tuple, int] = {}
    columns = problem.size, problem.alignment, problem.floor
    each = zip(*(column.tolist() for column in columns), strict=True)
    alike = []
    both = zip(_sections_of(problem), each, strict=True)
    for buffer, (alive, rest) in enumerate(both):
        alike.append(same.setdefault((*rest, alive.tobytes()), buffer))
    return np.array(alike, np.int64)
