"""Turns of exact search: for all of a small problem, for the kernel of a large one."""

import time

import numpy as np

from jaxmem.planning.layout.bottom import BottomStack
from jaxmem.planning.layout.exact import (
    LayoutSearch,
    LayoutSearchOptions,
    SearchStopped,
)
from jaxmem.planning.layout.fit import best_fit
from jaxmem.planning.layout.incumbent import Incumbent
from jaxmem.planning.layout.problem import LayoutProblem
from jaxmem.planning.layout.repair import EjectionRepair

# Buffers that are searched for at once, and those beyond which fewer sections of time
# are worth more than the choice between them.
_KERNEL = 1000
_THIN = 600
_PATIENCE = 0.25  # of a repair of what did not fit beside the kernel

_OPTIONS = tuple(
    options
    for long in (0.0, 0.5, 1.0)
    for options in (
        LayoutSearchOptions(30, 1.0, long),
        LayoutSearchOptions(10, 1.0, long),
        LayoutSearchOptions(30, 1.0, long),
        LayoutSearchOptions(10, 10.0, long, full=True),
    )
)
_ROUND = 1 + len(_OPTIONS)


class KernelSearch:
    """Searches for heights between the goal and the best layout so far.

    Args:
      incumbent: the problem, and what is known.
      bottom: what is not searched for.
      repair: of what is searched for.
      seed: of chance.
    """

    def __init__(
        self,
        incumbent: Incumbent,
        bottom: BottomStack,
        repair: EjectionRepair,
        seed: int,
    ):
        self._incumbent, self._bottom, self._seed = incumbent, bottom, seed
        self._repair = repair
        self._random = np.random.default_rng(seed)
        self._kernel, self._iteration = _kernel(bottom.above), 0
        self._search: LayoutSearch | None = None

    def iterate(self, deadline: float) -> None:
        """One search, and what follows from it."""
        rounds, place = divmod(self._iteration, _ROUND)
        if self._search is None or place == 0:
            # What was learned in a round is forgotten.
            thin = len(self._kernel) > _THIN
            part = self._bottom.above.part(self._kernel, thin=thin)
            self._search = LayoutSearch(part, self._seed + rounds)
        incumbent, target = self._incumbent, self._incumbent.goal
        if self._iteration % 3 == 2:
            target += int((incumbent.height - target) * self._random.random())
        self._iteration += 1
        target = max(target, self._bottom.need)
        try:
            found = self._search.run(target, _options(rounds, place), deadline)
        except SearchStopped:
            if len(incumbent.problem.size) > len(self._kernel):
                if time.monotonic() < deadline:
                    incumbent.fit(_promoted(incumbent, target, self._random))
            return
        if found is not None:
            self._take(found, target, deadline)
        elif not self._bottom.long.any():
            incumbent.prove(self._search.least)

    def _take(self, found: np.ndarray, target: int, deadline: float) -> None:
        """Completes what was found, by best fit and then by repair.

        What of the rest is too high after best fit joins the kernel.
        """
        problem, bottom = self._incumbent.problem, self._bottom
        kernel = bottom.rest[self._kernel]
        offsets = bottom.offsets.copy()
        offsets[kernel] = found
        there = bottom.long.copy()
        there[kernel] = True
        left = np.flatnonzero(~there)
        order = left[(-problem.size[left]).argsort(kind="stable")]
        offsets = best_fit(problem, order, np.flatnonzero(there), offsets)
        self._incumbent.offer(offsets)
        high = offsets[bottom.rest] + problem.size[bottom.rest] > target
        if high.any():
            self._kernel = np.union1d(self._kernel, np.flatnonzero(high))
            self._search = None
            low = self._repair.run(offsets[bottom.rest], target, _PATIENCE, deadline)
            if low is not None:
                self._incumbent.offer(bottom.with_rest(low))


def _kernel(problem: LayoutProblem) -> np.ndarray:
    """What is alive where memory is fullest, with what lies below: the most of it."""
    fullest = problem.fullest + problem.floor
    return np.sort(np.lexsort((-problem.size, -fullest))[:_KERNEL])


def _options(rounds: int, place: int) -> LayoutSearchOptions:
    """The options of a iterate; the first of a round may prove that there is no layout."""
    if place == 0:
        return LayoutSearchOptions(200 * 2**rounds, 1.0 if rounds else 0.0, whole=True)
    return _OPTIONS[place - 1]


def _promoted(
    incumbent: Incumbent, target: int, random: np.random.Generator
) -> np.ndarray:
    """The best order, with some of what lies above the target earlier."""
    place = np.empty(len(incumbent.order))
    place[incumbent.order] = np.arange(len(place))
    high = np.flatnonzero(incumbent.fitted + incumbent.problem.size > target)
    some = high[random.random(len(high)) < 0.3]
    place[some if len(some) else high] *= random.random()
    return place.argsort(kind="stable")
