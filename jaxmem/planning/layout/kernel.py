"""Exact searches: for all of a small problem, for the kernel of a large one."""

import time

import numpy as np

from jaxmem.planning.layout.bottom import BottomStack
from jaxmem.planning.layout.exact import (
    LayoutSearch,
    LayoutSearchOptions,
    SearchStopped,
)
from jaxmem.planning.layout.fit import place_in_order
from jaxmem.planning.layout.incumbent import Incumbent
from jaxmem.planning.layout.problem import LayoutProblem
from jaxmem.planning.layout.repair import EjectionRepair

_KERNEL = 1000  # buffers that are searched at once
_THIN = 600  # buffers above which thinned sections are worth the narrower choice
_PATIENCE = 0.25  # for repairing buffers that did not fit beside the kernel

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
    """Searches for heights between the goal and the best layout so far."""

    def __init__(
        self,
        incumbent: Incumbent,  # the problem, and the best layout so far
        bottom: BottomStack,  # the buffers that keep their offsets
        repair: EjectionRepair,  # of the others
        seed: int,  # of the random choices
    ):
        self._incumbent, self._bottom, self._seed = incumbent, bottom, seed
        self._repair = repair
        self._random = np.random.default_rng(seed)
        self._kernel, self._iteration = _kernel(bottom.above), 0
        self._search: LayoutSearch | None = None

    def iterate(self, deadline: float) -> None:
        """Searches once, and completes the layout or raises the bound."""
        rounds, place = divmod(self._iteration, _ROUND)
        if self._search is None or place == 0:
            # A round starts afresh: weights learned in the last one did not succeed.
            thin = len(self._kernel) > _THIN
            part = self._bottom.above.subset(self._kernel, thin=thin)
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
                # Best fit runs anew with buffers that were too high placed earlier, as
                # TelaMalloc (doi 10.1145/3567955.3567961) does.
                if time.monotonic() < deadline:
                    incumbent.fit(_promoted(incumbent, target, self._random))
            return
        if found is not None:
            self._take(found, target, deadline)
        elif not self._bottom.long.any():
            incumbent.prove(self._search.least)

    def _take(self, found: np.ndarray, target: int, deadline: float) -> None:
        """Completes a layout of the kernel, by best fit and then by repair."""
        # Buffers that best fit places too high join the kernel.
        problem, bottom = self._incumbent.problem, self._bottom
        kernel = bottom.rest[self._kernel]
        offsets = bottom.offsets.copy()
        offsets[kernel] = found
        placed = bottom.long.copy()
        placed[kernel] = True
        left = np.flatnonzero(~placed)
        order = left[(-problem.size[left]).argsort(kind="stable")]
        offsets = place_in_order(problem, order, np.flatnonzero(placed), offsets)
        self._incumbent.offer(offsets)
        high = offsets[bottom.rest] + problem.size[bottom.rest] > target
        if high.any():
            self._kernel = np.union1d(self._kernel, np.flatnonzero(high))
            self._search = None
            low = self._repair.run(offsets[bottom.rest], target, _PATIENCE, deadline)
            if low is not None:
                self._incumbent.offer(bottom.with_rest(low))


def _kernel(problem: LayoutProblem) -> np.ndarray:
    """The buffers alive where memory, with what lies below, is fullest."""
    fullest = problem.fullest + problem.floor
    return np.sort(np.lexsort((-problem.size, -fullest))[:_KERNEL])


def _options(rounds: int, place: int) -> LayoutSearchOptions:
    """The options of one search; the first of a round may prove that none fits."""
    if place == 0:
        return LayoutSearchOptions(200 * 2**rounds, 1.0 if rounds else 0.0, whole=True)
    return _OPTIONS[place - 1]


def _promoted(
    incumbent: Incumbent, target: int, random: np.random.Generator
) -> np.ndarray:
    """The best order, with some of the buffers above the target moved forward."""
    place = np.empty(len(incumbent.order))
    place[incumbent.order] = np.arange(len(place))
    high = np.flatnonzero(incumbent.fitted + incumbent.problem.size > target)
    some = high[random.random(len(high)) < 0.3]
    place[some if len(some) else high] *= random.random()
    return place.argsort(kind="stable")
