"""A large graph in one pass, given an order to lean on and a limit to stay under.

What leaves no more alive than before is done as soon as it fits under the limit: single
operations, and runs of a few that end no higher than they began (a weight's gradient
and the update that uses it up); what needs least room first, of equals what has waited
longest. Of the rest, the one that the given order has first is done. So a weight's
update comes at once where there is room, and late where its gradient would raise the
peak.

The same pass backward puts off what only adds: the cast of a weight, a gradient that
nothing uses up. With the limit at the peak of the given order neither pass can raise
it: the bytes alive are submodular, see `_exact.py`. With a lower limit a pass may get
stuck; it then does what raises the limit least.

Not optimal: runs are followed greedily, a few operations far, among a few readers.
"""

import heapq
from collections.abc import Sequence

from jaxmem.planning._live_ranges import OrderProblem
from jaxmem.planning.order.ready import ReadyOperations

RUN = 6  # operations that are looked ahead
LOOK = 32  # operations that are looked at: for one that fits, or that goes on a run


def swept(problem: OrderProblem, order: Sequence[int], limit: int) -> tuple[int, ...]:
    """The operations in a pass forward, then one backward over its order."""
    forward = sweep(problem, order, limit)
    return tuple(sweep(problem.reversed, forward[::-1], limit)[::-1])


def sweep(problem: OrderProblem, order: Sequence[int], limit: int) -> list[int]:
    """One pass forward.

    Args:
      problem: the operations.
      order: a valid order; it decides where nothing else does.
      limit: bytes to stay under where possible.

    Returns:
      The operations in order.
    """
    return _Sweep(problem, order, limit).run()


class _Sweep:
    """A pass: what can be done next, where it leads, and what has been done."""

    def __init__(self, problem: OrderProblem, order: Sequence[int], limit: int):
        self.problem, self.limit = problem, limit
        self.front = ReadyOperations(problem)
        self.walk = self.front.walk
        self.place = {i: n for n, i in enumerate(order)}
        # Ready operations: (bytes above live while it runs, the most on its run, run).
        self.known: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        # Runs: (most on it, operations done when it was found, place, operation).
        self.falling: list[tuple[int, int, int, int]] = []
        self.rising: list[tuple[int, int]] = []  # (place, operation)
        self.in_run: dict[int, set[int]] = {}  # operation -> ready ones that lead to it
        self.order: list[int] = []

    def run(self) -> list[int]:
        for i in self.front.start():
            self.look(i)
        while self.known:
            for i in self.choose():
                self.do(i)
        return self.order

    def do(self, i: int) -> None:
        self.known.pop(i, None)
        _, ready, touched = self.front.do(i)
        self.order.append(i)
        again = set(ready)
        for j in touched:
            again.update(self.in_run.pop(j, ()))
            again.add(j)
        for j in self.problem.after[i]:
            if self.front.missing[j] == 1:
                again.update(b for b in self.problem.before[j] if b in self.known)
        for j in sorted(again):
            if not self.front.missing[j] and not self.front.done[j]:
                self.look(j)

    def look(self, i: int) -> None:
        """What doing `i` next would cost, and where it could lead."""
        during, after = self.walk.cost(i)
        hill, run = (max(0, during), (i,)) if after <= 0 else self.follow(i)
        self.known[i] = (during, hill, run)
        if run:
            entry = (hill, len(self.order), self.place[i], i)
            heapq.heappush(self.falling, entry)
            for j in run[1:]:
                self.in_run.setdefault(j, set()).add(i)
        heapq.heappush(self.rising, (self.place[i], i))

    def follow(self, i: int) -> tuple[int, tuple[int, ...]]:
        """The run that begins with `i` and ends no higher; without one, no run."""
        walk, missing = self.walk, self.front.missing
        start, hill, run = walk.live, 0, []
        left: dict[int, int] = {}
        ready: list[int] = []
        while True:
            hill = max(hill, walk.do(i) - start)
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
        found = tuple(run) if walk.live <= start else ()
        for j in reversed(run):
            walk.undo(j)
        return hill, found

    def choose(self) -> tuple[int, ...]:
        """What is done next."""
        room = self.limit - self.walk.live
        while self.falling:
            hill, _, _, i = self.falling[0]
            known = self.known.get(i)
            if known and known[1] == hill and known[2] and hill <= room:
                return known[2]
            if known and known[1] == hill and known[2]:
                break
            heapq.heappop(self.falling)
        return (self.climb(room),)

    def climb(self, room: int) -> int:
        """Of what is ready the first that fits, or the lowest of the first few."""
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
        if self.known[i][0] > room:
            during, _, i = min((self.known[i][0], place, i) for place, i in seen)
            self.limit = self.walk.live + during
        return i
