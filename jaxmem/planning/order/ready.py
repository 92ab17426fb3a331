"""The operations that can be done next, and whose costs a step has changed."""

from collections.abc import Iterator

from jaxmem.planning._live_ranges import LiveWalk, OrderProblem


class ReadyOperations:
    """A walk that knows what is ready.

    Attributes:
      walk: the bytes alive.
      missing: operation -> how many of those before it are still to be done.
      done: operation -> whether it has been done.
    """

    def __init__(self, problem: OrderProblem):
        self.problem = problem
        self.walk = LiveWalk(problem)
        self.missing = [len(b) for b in problem.before]
        self.done = [False] * len(problem)

    def start(self) -> list[int]:
        """What is ready when nothing has been done."""
        return [i for i, missing in enumerate(self.missing) if not missing]

    def do(self, i: int) -> tuple[int, list[int], set[int]]:
        """Does operation `i`.

        Returns:
          The bytes alive while it runs, the operations that are ready by it, and those
          not done whose cost may have changed.
        """
        during = self.walk.do(i)
        self.done[i] = True
        ready = []
        for j in self.problem.after[i]:
            self.missing[j] -= 1
            if not self.missing[j]:
                ready.append(j)
        return during, ready, {j for j in self._touched(i) if not self.done[j]}

    def _touched(self, i: int) -> Iterator[int]:
        walk, pieces = self.walk, self.problem.pieces
        for k in self.problem.brings[i]:
            if walk.brought[k] == 1:
                yield from pieces[k].tails
                if walk.waits[k] == 1:
                    yield from pieces[k].heads
        for k in self.problem.ends[i]:
            if walk.waits[k] == 1:
                yield from pieces[k].heads
            elif not walk.waits[k]:
                yield from pieces[k].tails
