"""From a layout to a lower one, until the time is up.

A stretch of time with nothing alive at its ends is laid out by itself, and each turn
goes to the stretch that is highest. There are three kinds of turns.

Small problems are searched exactly (`_layout_search`), for the lowest height there can
be, then for some between it and the best so far. Of a large one only the *kernel* is
searched, what is alive where memory is fullest: the rest has room and follows by best
fit, and what of it lies too high joins the kernel. Where that fails, best fit is done
again with what lay too high placed earlier, as TelaMalloc (doi 10.1145/3567955.3567961)
does with what did not fit. And layouts are repaired (`_layout_repair`) under a height
between the lowest and the best.

In a training step most of what is alive at the peak is alive for long, and stacks at
the bottom almost without a gap. There it stays: the kernel, and what is repaired, are
of the rest, above it (`_layout_bottom`).
"""

import time
from collections.abc import Callable

import numpy as np

from jaxmem.planning.layout.bottom import Bottom, bottoms, no_bottom
from jaxmem.planning.layout.fit import orders, simple_order
from jaxmem.planning.layout.incumbent import Attempt, least_height
from jaxmem.planning.layout.kernel import KernelTurns
from jaxmem.planning.layout.problem import Problem
from jaxmem.planning.layout.repair import Repair, RepairTurns

_ORDERS = 0.2  # of the time, for best fit in other orders than XLA's
_SMALL = 500  # buffers of a problem in which search is worth more than repair
_SHARE = 0.1, 0.75  # of the time for repair: in small problems, in others
_FIRST = 13, 1  # searches before any repair: in small problems (a round), in others
_ROOM = 0.3  # of what is over the goal: what a bottom may take of it


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
      deadline: when to stop, in seconds of `time.monotonic`; XLA's two layouts are made
        all the same.
      seed: of chance.
      tell: called with height and bound as they change.

    Returns:
      Offsets and the bound, in units.
    """
    load = least_height(problem)
    goal = load if capacity is None else max(load, capacity)
    chosen = problem.stretches()
    attempts = [Attempt(problem.part(c), goal) for c in chosen]

    def state() -> tuple[int, int]:
        return (
            max((a.height for a in attempts), default=0),
            max((a.bound for a in attempts), default=load),
        )

    now = time.monotonic()
    until = now + _ORDERS * (deadline - now)
    for attempt, c in zip(attempts, chosen, strict=True):
        attempt.prove(least_height(attempt.problem))
        _fit(attempt, early[c], until)
    tell(*state())
    turns: dict[int, _Turns] = {}
    while attempts and time.monotonic() < deadline:
        # What counts is the highest; it need not be lower than another needs to be.
        worst = max(attempts, key=lambda a: a.height)
        worst.goal = max(worst.goal, *(a.bound for a in attempts))
        if worst.over:
            break
        if id(worst) not in turns:
            turns[id(worst)] = _Turns(worst, seed)
        turns[id(worst)].next(deadline)
        tell(*state())
    offsets = np.zeros(len(problem.size), np.int64)
    for attempt, c in zip(attempts, chosen, strict=True):
        offsets[c] = attempt.offsets
    return offsets, state()[1]


def _fit(attempt: Attempt, early: np.ndarray, deadline: float) -> None:
    """Best fit in some orders; in XLA's two whatever time it takes."""
    problem = attempt.problem
    simple = [simple_order(problem, by).tobytes() for by in ("size", "lifetime")]
    for order in orders(problem, early):
        if order.tobytes() in simple or time.monotonic() < deadline:
            fitted = attempt.fit(order)
            if order.tobytes() == simple[1]:
                attempt.long = fitted
            if attempt.over:
                return


class _Turns:
    """What is done for one problem, a turn after another."""

    def __init__(self, attempt: Attempt, seed: int):
        self._attempt, self._seed = attempt, seed
        self._bottoms: list[Bottom] = []
        self._kernels: dict[int, KernelTurns] = {}
        self._repairs: dict[int, RepairTurns] = {}
        self._small = len(attempt.problem.size) <= _SMALL
        which = 0 if self._small else 1
        self._share, self._first = _SHARE[which], _FIRST[which]
        self._spent = [0.0, 0.0]  # seconds of search and of repair

    def next(self, deadline: float) -> None:
        """A turn of what has had less than its share of the time."""
        attempt, begin = self._attempt, time.monotonic()
        which = self._bottom()
        bottom = self._bottoms[which]
        if which not in self._repairs:
            repair = Repair(bottom.above, self._seed)
            self._kernels[which] = KernelTurns(attempt, bottom, repair, self._seed)
            self._repairs[which] = RepairTurns(attempt, bottom, repair)
        self._first -= 1
        due = self._spent[1] <= self._share * sum(self._spent)
        searched = (self._first >= 0 or not due) and not attempt.problem.windowed
        if searched:
            self._kernels[which].turn(deadline)
        else:
            self._repairs[which].turn(deadline)
        self._spent[0 if searched else 1] += time.monotonic() - begin

    def _bottom(self) -> int:
        """The number of the largest bottom that lets a lower height be found."""
        attempt = self._attempt
        if not self._bottoms:
            if not self._small:  # all of a small problem can be searched
                self._bottoms = bottoms(attempt.problem, attempt.long)
            self._bottoms.append(no_bottom(attempt.problem))
        most = attempt.goal + _ROOM * (attempt.height - attempt.goal)
        return next(k for k, b in enumerate(self._bottoms) if b.need <= most)
