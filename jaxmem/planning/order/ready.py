"""The operations that can run next, and those whose cost a step has changed."""

from collections.abc import Iterator

from jaxmem.planning._live_ranges import LiveWalk, OrderProblem


class ReadyOperations:
    """A walk that knows which operations are ready."""

    def __init__(self, problem: OrderProblem):
        self.problem = problem
        self.walk = LiveWalk(problem)  # the bytes alive
        self.missing = [len(b) for b in problem.before]  # predecessors yet to run
        self.done = [False] * len(problem)  # operation -> whether it has run

    def start(self) -> list[int]:
        """The operations without predecessors."""
        return [i for i, missing in enumerate(self.missing) if not missing]

    def do(self, i: int) -> tuple[int, list[int], set[int]]:
        """Runs `i`: bytes alive meanwhile, what is ready now, what changed its cost."""
        during = self.walk.do(i)
        self.done[i] = True
        ready = []
        for j in self.problem.after[i]:
            self.missing[j] -= 1
            if not self.missing[j]:
                ready.append(j)
        return during, ready, {j for j in self._touched(i) if not self.done[j]}

    def _touched(self, i: int) -> Iterator[int]:
        # A range changes the cost of others when it comes to life, when one end is
        # left (that one will free it), and when it is dead before a start has run.
        walk, ranges = self.walk, self.problem.ranges
        for k in self.problem.started_by[i]:
            if walk.started[k] == 1:
                yield from ranges[k].starts
                if walk.pending[k] == 1:
                    yield from ranges[k].ends
        for k in self.problem.ended_by[i]:
            if walk.pending[k] == 1:
                yield from ranges[k].ends
            elif not walk.pending[k]:
                yield from ranges[k].starts
