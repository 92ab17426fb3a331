"""From a layout to a lower one, until the time is up.

Heights are tried for: the lowest there can be, then in turn with some between it and
the best so far. In a large problem only its *kernel* is searched for
(`_layout_search`), what is alive where memory is fullest: the rest has room and
follows by best fit, and what of it lies too high joins the kernel. Where that fails,
best fit is done again with what lay too high placed earlier, as TelaMalloc
(doi 10.1145/3567955.3567961) does with what did not fit.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from jaxmem.planning._layout_fit import best_fit, orders
from jaxmem.planning._layout_problem import Problem
from jaxmem.planning._layout_search import GaveUp, Search, Taste

# Buffers that are searched for at once, and those beyond which fewer sections of time
# are worth more than the choice between them.
_KERNEL = 1000
_THIN = 600

_none = partial(np.zeros, 0, np.int64)

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


@dataclass
class Attempt:
    """The lowest layout so far of one problem.

    Attributes:
      problem: the buffers.
      goal: the height to reach; never below the bound.
      bound: a height below which no layout is, proven.
      offsets: of the best so far.
      order: in which best fit did best.
      fitted: the offsets that it gave.
    """

    problem: Problem
    goal: int
    bound: int = 0
    offsets: np.ndarray = field(default_factory=_none)
    order: np.ndarray = field(default_factory=_none)
    fitted: np.ndarray = field(default_factory=_none)

    @property
    def height(self) -> int:
        return self.problem.height(self.offsets)

    def offer(self, offsets: np.ndarray) -> None:
        """Takes a layout, if it is lower."""
        if not len(self.offsets) or self.problem.height(offsets) < self.height:
            self.offsets = offsets

    def fit(self, order: np.ndarray) -> None:
        """Offers what best fit makes of an order, and takes it, if it is not worse."""
        fitted, height = best_fit(self.problem, order), self.problem.height
        if not len(self.fitted) or height(fitted) <= height(self.fitted):
            self.order, self.fitted = order, fitted
        self.offer(fitted)

    def prove(self, bound: int) -> None:
        """Takes a bound that is higher."""
        self.bound = max(self.bound, bound)
        self.goal = max(self.goal, self.bound)

    @property
    def over(self) -> bool:
        """Whether there is nothing more to do."""
        return self.height <= self.goal


def improve(
    problem: Problem,
    capacity: int | None,
    early: np.ndarray,
    deadline: float,
    seed: int,
    tell: Callable[[int, int], object],
) -> tuple[np.ndarray, int]:
    """The lowest layout found, and a height below which there is none.

    Args:
      problem: the buffers.
      capacity: the height to reach, at least the load; None is the lowest.
      early: true for the buffers to be placed first in one of the first layouts.
      deadline: when to stop, in seconds of `time.monotonic`.
      seed: of chance.
      tell: called with height and bound as they change.

    Returns:
      Offsets and the bound, in units.
    """
    load = int(problem.load.max(initial=0))
    goal = load if capacity is None else capacity
    chosen = problem.stretches()
    attempts = [Attempt(problem.part(c), goal) for c in chosen]

    def state() -> tuple[int, int]:
        return (
            max((a.height for a in attempts), default=0),
            max((a.bound for a in attempts), default=load),
        )

    for attempt, c in zip(attempts, chosen, strict=True):
        attempt.prove(int(attempt.problem.load.max()))
        _fit(attempt, early[c], deadline)
    tell(*state())
    open_ones = sorted((a for a in attempts if not a.over), key=lambda a: -a.height)
    for i, attempt in enumerate(open_ones):
        now = time.monotonic()
        until = now + (deadline - now) / (len(open_ones) - i)
        # It need not be lower than what another stretch needs for certain.
        attempt.goal = max(attempt.goal, *(a.bound for a in attempts))
        _search(attempt, until, seed, lambda: tell(*state()))
    offsets = np.zeros(len(problem.size), np.int64)
    for attempt, c in zip(attempts, chosen, strict=True):
        offsets[c] = attempt.offsets
    return offsets, state()[1]


def _fit(attempt: Attempt, early: np.ndarray, deadline: float) -> None:
    """Best fit in some orders."""
    for order in orders(attempt.problem, early):
        attempt.fit(order)
        if attempt.over or time.monotonic() > deadline:
            return


def _search(
    attempt: Attempt, deadline: float, seed: int, tell: Callable[[], object]
) -> None:
    """Tries for lower heights until the deadline."""
    problem, random = attempt.problem, np.random.default_rng(seed)
    kernel = np.sort(np.lexsort((-problem.size, -problem.fullest))[:_KERNEL])
    search = None
    for turn in itertools.count():
        if attempt.over or time.monotonic() > deadline:
            return
        rounds, place = divmod(turn, _ROUND)
        if search is None or place == 0:  # what was learned in a round is forgotten
            part = problem.part(kernel, thin=len(kernel) > _THIN)
            search = Search(part, seed + rounds)
        target, taste = attempt.goal, _taste(rounds, place)
        if turn % 3 == 2:
            target += int((attempt.height - target) * random.random())
        try:
            found = search.run(target, taste, deadline)
        except GaveUp:
            if len(problem.size) > len(kernel):
                attempt.fit(_promoted(attempt, target, random))
        else:
            if found is None:
                attempt.prove(search.least)
                continue
            offsets = _completed(problem, kernel, found)
            attempt.offer(offsets)
            high = np.flatnonzero(offsets + problem.size > target)
            if len(high):
                kernel = np.union1d(kernel, high)
                search = None
        tell()


def _taste(rounds: int, place: int) -> Taste:
    """The taste of a turn; the first of a round may prove that there is no layout."""
    if place == 0:
        return Taste(200 * 2**rounds, 1.0 if rounds else 0.0, whole=True)
    return _TASTES[place - 1]


def _completed(problem: Problem, kernel: np.ndarray, found: np.ndarray) -> np.ndarray:
    """All offsets: those found for the kernel, and best fit for the rest."""
    offsets = np.zeros(len(problem.size), np.int64)
    offsets[kernel] = found
    rest = np.delete(np.arange(len(problem.size)), kernel)
    order = rest[(-problem.size[rest]).argsort(kind="stable")]
    return best_fit(problem, order, kernel, offsets)


def _promoted(attempt: Attempt, target: int, random: np.random.Generator) -> np.ndarray:
    """The best order, with some of what lies above the target earlier."""
    place = np.empty(len(attempt.order))
    place[attempt.order] = np.arange(len(place))
    high = np.flatnonzero(attempt.fitted + attempt.problem.size > target)
    some = high[random.random(len(high)) < 0.3]
    place[some if len(some) else high] *= random.random()
    return place.argsort(kind="stable")
