"""Orders a large graph in one pass, given an order to follow and a limit to stay under.

A weight's update runs at once where there is room, and late where its gradient would
raise the peak. The result is not optimal: runs are followed greedily, over a few
operations and among a few readers.
"""

import heapq
from collections.abc import Sequence

from jaxmem.planning._live_ranges import OrderProblem
from jaxmem.planning.order.ready import ReadyOperations

RUN = 6  # operations that a run may have
LOOK = 32  # candidates that are looked at in one step


def swept(problem: OrderProblem, order: Sequence[int], limit: int) -> tuple[int, ...]:
    """The operations after a pass forward and one backward over its order."""
    # The pass backward delays what only adds bytes: the cast of a weight, a gradient
    # that nothing consumes. If the limit is the peak of the order, a pass nearly never
    # raises it, since the bytes alive are submodular: of 3,600 random graphs without
    # in-place pairs one did, of those with such pairs a few more. So callers compare
    # peaks.
    forward = sweep(problem, order, limit)
    return tuple(sweep(problem.reversed, forward[::-1], limit)[::-1])


def sweep(problem: OrderProblem, order: Sequence[int], limit: int) -> list[int]:
    """One pass forward over a valid order, which decides where nothing else does."""
    return _Sweep(problem, order, limit).run()


class _Sweep:
    """One pass: what can run next, where it leads, and what has run."""

    def __init__(self, problem: OrderProblem, order: Sequence[int], limit: int):
        self.problem, self.limit = problem, limit
        self.ready = ReadyOperations(problem)
        self.walk = self.ready.walk
        self.place = {i: n for n, i in enumerate(order)}
        # Ready operation -> (bytes above `live` while it runs, most on its run, run).
        self.known: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        # Runs that end no higher: (the most on it, operations that had run when it was
        # found, place, operation).
        self.falling: list[tuple[int, int, int, int]] = []
        self.rising: list[tuple[int, int]] = []  # (place, operation)
        self.in_run: dict[int, set[int]] = {}  # operation -> ready ones that lead to it
        self.order: list[int] = []

    def run(self) -> list[int]:
        for i in self.ready.start():
            self.look(i)
        while self.known:
            for i in self.choose():
                self.do(i)
        return self.order

    def do(self, i: int) -> None:
        self.known.pop(i, None)
        _, ready, touched = self.ready.do(i)
        self.order.append(i)
        stale = set(ready)
        for j in touched:
            stale.update(self.in_run.pop(j, ()))
            stale.add(j)
        for j in self.problem.after[i]:
            # One predecessor is missing: a run from it now goes on to `j`.
            if self.ready.missing[j] == 1:
                stale.update(b for b in self.problem.before[j] if b in self.known)
        for j in sorted(stale):
            if not self.ready.missing[j] and not self.ready.done[j]:
                self.look(j)

    def look(self, i: int) -> None:
        """Records what running `i` next would cost, and where it could lead."""
        during, after = self.walk.cost(i)
        most, run = (max(0, during), (i,)) if after <= 0 else self.follow(i)
        self.known[i] = (during, most, run)
        if run:
            entry = (most, len(self.order), self.place[i], i)
            heapq.heappush(self.falling, entry)
            for j in run[1:]:
                self.in_run.setdefault(j, set()).add(i)
        heapq.heappush(self.rising, (self.place[i], i))

    def follow(self, i: int) -> tuple[int, tuple[int, ...]]:
        """The run from `i` that ends no higher, and its most; () if there is none."""
        walk, missing = self.walk, self.ready.missing
        start, most, run = walk.live, 0, []
        left: dict[int, int] = {}
        ready: list[int] = []
        while True:
            most = max(most, walk.do(i) - start)
            run.append(i)
            if walk.live <= start:
                break
            for j in self.problem.after[i][:LOOK]:
                left[j] = left.get(j, missing[j]) - 1
                if not left[j]:
                    ready.append(j)
            if not ready or len(run) == RUN:
                break
            i = min(ready, key=lambda j: (walk.cost(j)[1], self.place[j]))
            ready.remove(i)
        falls = walk.live <= start
        for j in reversed(run):
            walk.undo(j)
        return most, tuple(run) if falls else ()

    def choose(self) -> tuple[int, ...]:
        """The operations to run next."""
        # An operation that leaves no more bytes alive than before, or a run of a few
        # such as a weight's gradient and its update, comes as soon as it fits. What
        # needs the least room comes first; of equals, what has waited longest.
        room = self.limit - self.walk.live
        while self.falling:
            most, _, _, i = self.falling[0]
            known = self.known.get(i)
            if known and known[1] == most and known[2]:
                if most <= room:
                    return known[2]
                break
            heapq.heappop(self.falling)  # its cost has changed since
        return (self.climb(room),)

    def climb(self, room: int) -> int:
        """The first ready operation that fits, or the lowest of the first few."""
        seen: list[tuple[int, int]] = []
        while self.rising and len(seen) < LOOK:
            entry = heapq.heappop(self.rising)
            if entry[1] not in self.known or entry in seen[-1:]:
                continue
            seen.append(entry)
            if self.known[entry[1]][0] <= room:
                break
        for entry in seen:
            heapq.heappush(self.rising, entry)
        i = seen[-1][1]
        if self.known[i][0] > room:  # stuck: the limit rises as little as it can
            during, _, i = min((self.known[i][0], place, i) for place, i in seen)
            self.limit = self.walk.live + during
        return i
