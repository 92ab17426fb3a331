"""Turns of exact search: for all of a small problem, for the kernel of a large one."""

import time

import numpy as np

from jaxmem.planning.layout.bottom import Bottom
from jaxmem.planning.layout.exact import GaveUp, Search, Taste
from jaxmem.planning.layout.fit import best_fit
from jaxmem.planning.layout.incumbent import Attempt
from jaxmem.planning.layout.problem import Problem
from jaxmem.planning.layout.repair import Repair

# Buffers that are searched for at once, and those beyond which fewer sections of time
# are worth more than the choice between them.
_KERNEL = 1000
_THIN = 600
_PATIENCE = 0.25  # of a repair of what did not fit beside the kernel

_TASTES = tuple(
    taste
    for long in (0.0, 0.5, 1.0)
    for taste in (
        Taste(30, 1.0, long),
        Taste(10, 1.0, long),
        Taste(30, 1.0, long),
        Taste(10, 10.0, long, full=True),
    )
)
_ROUND = 1 + len(_TASTES)


class KernelTurns:
    """Searches for heights between the goal and the best layout so far.

    Args:
      attempt: the problem, and what is known.
      bottom: what is not searched for.
      repair: of what is searched for.
      seed: of chance.
    """

    def __init__(self, attempt: Attempt, bottom: Bottom, repair: Repair, seed: int):
        self._attempt, self._bottom, self._seed = attempt, bottom, seed
        self._repair = repair
        self._random = np.random.default_rng(seed)
        self._kernel, self._turn = _kernel(bottom.above), 0
        self._search: Search | None = None

    def turn(self, deadline: float) -> None:
        """One search, and what follows from it."""
        rounds, place = divmod(self._turn, _ROUND)
        if self._search is None or place == 0:
            # What was learned in a round is forgotten.
            thin = len(self._kernel) > _THIN
            part = self._bottom.above.part(self._kernel, thin=thin)
            self._search = Search(part, self._seed + rounds)
        attempt, target = self._attempt, self._attempt.goal
        if self._turn % 3 == 2:
            target += int((attempt.height - target) * self._random.random())
        self._turn += 1
        target = max(target, self._bottom.need)
        try:
            found = self._search.run(target, _taste(rounds, place), deadline)
        except GaveUp:
            if len(attempt.problem.size) > len(self._kernel):
                if time.monotonic() < deadline:
                    attempt.fit(_promoted(attempt, target, self._random))
            return
        if found is not None:
            self._take(found, target, deadline)
        elif not self._bottom.long.any():
            attempt.prove(self._search.least)

    def _take(self, found: np.ndarray, target: int, deadline: float) -> None:
        """Completes what was found, by best fit and then by repair.

        What of the rest is too high after best fit joins the kernel.
        """
        problem, bottom = self._attempt.problem, self._bottom
        kernel = bottom.rest[self._kernel]
        offsets = bottom.offsets.copy()
        offsets[kernel] = found
        there = bottom.long.copy()
        there[kernel] = True
        left = np.flatnonzero(~there)
        order = left[(-problem.size[left]).argsort(kind="stable")]
        offsets = best_fit(problem, order, np.flatnonzero(there), offsets)
        self._attempt.offer(offsets)
        high = offsets[bottom.rest] + problem.size[bottom.rest] > target
        if high.any():
            self._kernel = np.union1d(self._kernel, np.flatnonzero(high))
            self._search = None
            low = self._repair.run(offsets[bottom.rest], target, _PATIENCE, deadline)
            if low is not None:
                self._attempt.offer(bottom.with_rest(low))


def _kernel(problem: Problem) -> np.ndarray:
    """What is alive where memory is fullest, with what lies below: the most of it."""
    fullest = problem.fullest + problem.floor
    return np.sort(np.lexsort((-problem.size, -fullest))[:_KERNEL])


def _taste(rounds: int, place: int) -> Taste:
    """The taste of a turn; the first of a round may prove that there is no layout."""
    if place == 0:
        return Taste(200 * 2**rounds, 1.0 if rounds else 0.0, whole=True)
    return _TASTES[place - 1]


def _promoted(attempt: Attempt, target: int, random: np.random.Generator) -> np.ndarray:
    """The best order, with some of what lies above the target earlier."""
    place = np.empty(len(attempt.order))
    place[attempt.order] = np.arange(len(place))
    high = np.flatnonzero(attempt.fitted + attempt.problem.size > target)
    some = high[random.random(len(high)) < 0.3]
    place[some if len(some) else high] *= random.random()
    return place.argsort(kind="stable")
