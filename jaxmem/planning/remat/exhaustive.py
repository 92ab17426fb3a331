"""The cheapest recomputation over all orders and repeats, for a few operations.

A shortest path (Dijkstra) over what has run at least once and what is in memory. The
first run of an operation is free, in any order; a repeat has its cost; dropping a value
is free. The number of states grows exponentially with the operations that can run in
any order; the search finishes for up to a dozen or two of them.
"""

import heapq
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxmem.planning._bitsets import bitset, members, union
from jaxmem.planning._live_ranges import overwritten_bytes
from jaxmem.planning.remat.sequence import SequenceTables

STATES = 100_000  # expanded at most, by default: a minute or so


@dataclass(frozen=True)
class ExhaustiveResult:
    """The result of a search over all sequences."""

    sequence: np.ndarray | None  # the cheapest, if it is cheaper than the known one
    complete: bool  # whether it is proven that nothing is cheaper than either


def search_all(
    tables: SequenceTables,  # a graph without aliases
    cost: np.ndarray,  # of a repeat of each operation
    budget: float,  # bytes
    most: float = np.inf,  # the cost of a known sequence; only cheaper ones count
    states: int = STATES,  # how many may be expanded
    until: float = np.inf,  # when to stop, by `time.monotonic`
) -> ExhaustiveResult:
    """The cheapest of all sequences within a budget."""
    return _ExhaustiveSearch(tables, cost.tolist(), budget).cheapest(
        most, states, until
    )


class _ExhaustiveState(NamedTuple):
    """The operations that have run, and the values in memory, as bit sets."""

    done: int
    alive: int


class _ExhaustiveSearch:
    """Dijkstra's algorithm over states; an edge is an operation that runs."""

    def __init__(self, tables: SequenceTables, cost: list[float], budget: float):
        self._cost, self._budget = cost, budget
        self._count = len(tables.makes)
        self._size = [int(s) for s in tables.size]
        self._reads = [bitset(r) for r in tables.reads]
        self._makes = [bitset(m) for m in tables.makes]
        self._recomputable = tables.recomputable.tolist()
        self._maker = tables.maker.tolist()
        self._held = bitset(tables.held.tolist())
        self._once = union(
            made for i, made in enumerate(self._makes) if not self._recomputable[i]
        )
        operations = tables.graph.operations
        self._scratch = [o.scratch for o in operations]
        self._overwrites = [
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
            # A state is left out if another one, reached at no higher cost, has run the
            # same operations and has at least the same values in memory.
            if any(state.alive & ~other == 0 for other in largest):
                continue
            if state.done == everything and self._held & ~state.alive == 0:
                return ExhaustiveResult(_sequence(came, state), True)
            largest.append(state.alive)
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
        """The operations that can run next, with the states that follow."""
        useful = self._useful(state.done)
        for i in range(self._count):
            if self._reads[i] & ~state.alive:
                continue
            first = not state.done >> i & 1
            lacking = self._makes[i] & useful & ~state.alive
            if first or (self._recomputable[i] and lacking):
                done = state.done | 1 << i
                for alive in self._after(i, state.alive, done):
                    yield i, _ExhaustiveState(done, alive)

    def _after(self, i: int, alive: int, done: int) -> Iterator[int]:
        """What can be alive after an operation, dropping as little as possible."""
        # A minimal set is enough: what stays can still be dropped later.
        useful, fixed = self._useful(done), self._fixed(done)
        reads, makes = self._reads[i], self._makes[i]
        alive &= useful | reads  # nothing needs the others, so they go first
        dead = reads & ~useful
        droppable = list(members(alive & useful & ~fixed))
        overwritable = {u for _, _, u in self._overwrites[i]}
        dying = [u for u in droppable if u in overwritable and reads >> u & 1]
        others = [v for v in droppable if not (reads | makes) >> v & 1]
        whole = self._bytes(alive | makes) + self._scratch[i]
        fitting: list[int] = []
        # Inputs may be dropped here to be overwritten; none of them, if that fits.
        for count in range(len(dying) + 1):
            for some in itertools.combinations(dying, count):
                last = dead | bitset(some)
                if any(last & f == f for f in fitting):
                    continue
                pairs = (p for p in self._overwrites[i] if last >> p[2] & 1)
                saved = overwritten_bytes(pairs)
                excess = whole - saved - self._budget
                for dropped in self._least_drops(others, excess):
                    if not dropped:
                        fitting.append(last)
                    yield (alive | makes) & useful & ~bitset(some) & ~dropped

    def _least_drops(self, values: list[int], excess: float) -> Iterator[int]:
        """The minimal sets of values of at least `excess` bytes."""
        if excess <= 0:
            yield 0
            return
        values = sorted(
            (v for v in values if self._size[v]), key=self._size.__getitem__
        )
        total = list(itertools.accumulate((self._size[v] for v in values), initial=0))

        def rest(count: int, missing: float) -> Iterator[int]:
            """Of the first `count` values; from large to small, so each is needed."""
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
        """Outputs, and values that may be read after these operations have run."""
        known = self._useful_after.get(done)
        if known is not None:
            return known
        useful, stack = self._held, [i for i in range(self._count) if not done >> i & 1]
        stack += [self._maker[v] for v in members(self._held)]
        seen = set(stack)
        while stack:
            i = stack.pop()
            if done >> i & 1 and not self._recomputable[i]:
                continue
            useful |= self._reads[i]
            # Any of these values may be dropped and recomputed, from what it needs.
            makers = {self._maker[v] for v in members(self._reads[i])} - seen
            seen |= makers
            stack += makers
        self._useful_after[done] = useful
        return useful

    def _fixed(self, done: int) -> int:
        """Values that must not be dropped: they are needed and cannot be recomputed."""
        needed = self._held
        for i in range(self._count):
            if not done >> i & 1:
                needed |= self._reads[i]
        return needed & self._once

    def _bytes(self, values: int) -> int:
        return sum(self._size[v] for v in members(values))


def _sequence(came, state: _ExhaustiveState) -> np.ndarray:
    steps = []
    while state in came:
        state, i = came[state]
        steps.append(i)
    return np.array(steps[::-1], np.int64)
