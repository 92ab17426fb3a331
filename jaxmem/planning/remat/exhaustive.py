"""The cheapest recomputation over all orders and repeats, for a few operations.

A shortest path (Dijkstra) over what has been done at least once and what is in memory.
Doing an operation for the first time is free, in whatever order; a repeat has its cost;
to drop a value is free. What is proven here is proven of every sequence.

Three rules make it small, and none loses the optimum:

- A value that nothing can read any more is dropped at once.
- Otherwise values are dropped only when an operation would not fit, and then no more of
  them than it takes: what is there can still be dropped later.
- A state is left out when another one, reached at no higher cost, has the same done and
  as much or more in memory.

The states grow exponentially with the operations that can be in any order; up to a
dozen or two of them it ends.
"""

import heapq
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxmem.planning._liveness import written_over
from jaxmem.planning.remat.sequence import SequenceTables

STATES = 100_000


@dataclass(frozen=True)
class ExhaustiveResult:
    """What the search over all sequences came to.

    Attributes:
      sequence: the cheapest, if one cheaper than what was known was found.
      complete: whether it came to its end: nothing is cheaper than the sequence, or,
        without one, than what was known; where nothing was known, there is none.
    """

    sequence: np.ndarray | None
    complete: bool


def search_all(
    tables: SequenceTables,
    cost: np.ndarray,
    budget: float,
    most: float = np.inf,
    states: int = STATES,
    until: float = np.inf,
) -> ExhaustiveResult:
    """The cheapest of all sequences within a budget.

    Args:
      tables: a graph without aliases.
      cost: of a repeat of each operation.
      budget: bytes.
      most: the cost of a sequence that is known already; only cheaper ones are looked
        for.
      states: how many may be looked at.
      until: when to stop, by `time.monotonic`.
    """
    return _ExhaustiveSearch(tables, cost.tolist(), budget).cheapest(
        most, states, until
    )


class _ExhaustiveState(NamedTuple):
    """Sets are whole numbers with a bit for each operation or value."""

    done: int
    there: int


class _ExhaustiveSearch:
    def __init__(self, tables: SequenceTables, cost: list[float], budget: float):
        self._cost, self._budget = cost, budget
        self._count = len(tables.makes)
        self._size = [int(s) for s in tables.size]
        self._reads = [_set(r) for r in tables.reads]
        self._makes = [_set(m) for m in tables.makes]
        self._recomputable = tables.recomputable.tolist()
        self._maker = tables.maker.tolist()
        self._held = _set(tables.held.tolist())
        once = [m for i, m in enumerate(tables.makes) if not self._recomputable[i]]
        self._once = _set(v for made in once for v in made)
        operations = tables.graph.operations
        self._scratch = [o.scratch for o in operations]
        self._over = [
            [
                (min(self._size[v], self._size[u]), v, u)
                for v, u in o.in_place
                if self._maker[u] >= 0 and v not in tables.graph.aliases
            ]
            for o in operations
        ]
        self._useful_after: dict[int, int] = {}

    def cheapest(self, most: float, states: int, until: float) -> ExhaustiveResult:
        everything, start = (1 << self._count) - 1, _ExhaustiveState(0, 0)
        came: dict[_ExhaustiveState, tuple[_ExhaustiveState, int]] = {}
        best, number = {start: 0.0}, itertools.count()
        queue = [(0.0, 0, next(number), start)]
        settled: dict[int, list[int]] = {}
        while queue:
            cost, _, _, state = heapq.heappop(queue)
            if cost >= most:
                break
            largest = settled.setdefault(state.done, [])
            if any(state.there & ~other == 0 for other in largest):
                continue
            if state.done == everything and self._held & ~state.there == 0:
                return ExhaustiveResult(_sequence(came, state), True)
            largest.append(state.there)
            states -= 1
            if states < 0 or time.monotonic() > until:
                return ExhaustiveResult(None, False)
            for i, after in self._steps(state):
                price = cost + (self._cost[i] if state.done >> i & 1 else 0.0)
                if price < most and price < best.get(after, np.inf):
                    best[after], came[after] = price, (state, i)
                    left = self._count - after.done.bit_count()
                    heapq.heappush(queue, (price, left, next(number), after))
        return ExhaustiveResult(None, True)

    def _steps(self, state: _ExhaustiveState) -> Iterator[tuple[int, _ExhaustiveState]]:
        """What can be done next, and what is there after it."""
        useful = self._useful(state.done)
        for i in range(self._count):
            if self._reads[i] & ~state.there:
                continue
            first = not state.done >> i & 1
            lacking = self._makes[i] & useful & ~state.there
            if first or (self._recomputable[i] and lacking):
                done = state.done | 1 << i
                for there in self._after(i, state.there, done):
                    yield i, _ExhaustiveState(done, there)

    def _after(self, i: int, there: int, done: int) -> Iterator[int]:
        """What can be there after an operation, dropping as little as it takes."""
        useful, fixed = self._useful(done), self._fixed(done)
        reads, makes = self._reads[i], self._makes[i]
        there &= useful | reads  # the rest may go before it runs
        dead = reads & ~useful
        droppable = list(_members(there & useful & ~fixed))
        over = {u for _, _, u in self._over[i]}
        dying = [u for u in droppable if u in over and reads >> u & 1]
        others = [v for v in droppable if not (reads | makes) >> v & 1]
        whole = self._bytes(there | makes) + self._scratch[i]
        fitting: list[int] = []
        # Inputs that die here may be written over: none of them, if that is enough.
        for count in range(len(dying) + 1):
            for some in itertools.combinations(dying, count):
                last = dead | _set(some)
                if any(last & f == f for f in fitting):
                    continue
                saved = written_over(p for p in self._over[i] if last >> p[2] & 1)
                excess = whole - saved - self._budget
                for dropped in self._least_drops(others, excess):
                    if not dropped:
                        fitting.append(last)
                    yield (there | makes) & useful & ~_set(some) & ~dropped

    def _least_drops(self, values: list[int], excess: float) -> Iterator[int]:
        """The sets of values of which none can be left out, of at least so many bytes.

        Nothing, if that is enough.
        """
        if excess <= 0:
            yield 0
            return
        values = sorted(
            (v for v in values if self._size[v]), key=self._size.__getitem__
        )
        total = list(itertools.accumulate((self._size[v] for v in values), initial=0))

        def rest(count: int, missing: float) -> Iterator[int]:
            """Of the first so many, the largest first; so the last one is needed."""
            if missing <= 0:
                yield 0
                return
            for k in range(count - 1, -1, -1):
                if total[k + 1] < missing:
                    return
                for chosen in rest(k, missing - self._size[values[k]]):
                    yield chosen | 1 << values[k]

        yield from rest(len(values), excess)

    def _useful(self, done: int) -> int:
        """Values that may be read when these operations have been done, and outputs."""
        known = self._useful_after.get(done)
        if known is not None:
            return known
        useful, stack = self._held, [i for i in range(self._count) if not done >> i & 1]
        stack += [self._maker[v] for v in _members(self._held)]
        seen = set(stack)
        while stack:
            i = stack.pop()
            if done >> i & 1 and not self._recomputable[i]:
                continue
            useful |= self._reads[i]
            makers = {self._maker[v] for v in _members(self._reads[i])} - seen
            seen |= makers
            stack += makers
        self._useful_after[done] = useful
        return useful

    def _fixed(self, done: int) -> int:
        """Values that must not be dropped: they are needed, and made only once."""
        needed = self._held
        for i in range(self._count):
            if not done >> i & 1:
                needed |= self._reads[i]
        return needed & self._once

    def _bytes(self, values: int) -> int:
        return sum(self._size[v] for v in _members(values))


def _sequence(came, state: _ExhaustiveState) -> np.ndarray:
    steps = []
    while state in came:
        state, i = came[state]
        steps.append(i)
    return np.array(steps[::-1], np.int64)


def _set(members) -> int:
    found = 0
    for k in members:
        found |= 1 << k
    return found


def _members(values: int) -> Iterator[int]:
    while values:
        low = values & -values
        yield low.bit_length() - 1
        values ^= low
