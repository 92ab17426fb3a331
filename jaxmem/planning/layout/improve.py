"""From a layout to a lower one, until the deadline.

Each stretch of time with nothing alive at its ends is laid out by itself, and each
iteration goes to the stretch that is highest. There are three kinds of iterations.

Small problems are searched exactly (`exact`), for the lowest possible height, then for
some heights between it and the best so far. Of a large problem only the *kernel* is
searched, the buffers alive where memory is fullest. The others have room and follow by
best fit; those that end too high join the kernel. If the search fails, best fit runs
anew with buffers that were too high placed earlier, as TelaMalloc
(doi 10.1145/3567955.3567961) does. Finally, layouts are repaired (`repair`) under a
height between the lowest and the best.

In a training step most of what is alive at the peak lives long, and stacks at the
bottom almost without a gap (`bottom`). It stays there: search and repair work on the
other buffers, above it.
"""

import time
from collections.abc import Callable

import numpy as np

from jaxmem.planning.layout.bottom import BottomStack, bottoms, no_bottom
from jaxmem.planning.layout.fit import orders, simple_order
from jaxmem.planning.layout.incumbent import Incumbent, least_height
from jaxmem.planning.layout.kernel import KernelSearch
from jaxmem.planning.layout.problem import LayoutProblem
from jaxmem.planning.layout.repair import EjectionRepair, RepairSearch

_ORDERS = 0.2  # of the time, for best fit in other orders than XLA's
_SMALL = 500  # buffers up to which search is worth more than repair
_SHARE = 0.1, 0.75  # of the time, for repair: in small problems, in others
_FIRST = 13, 1  # searches before any repair: in small problems (one round), in others
_ROOM = 0.3  # of the excess over the goal that a bottom stack may take


def improve(
    problem: LayoutProblem,  # the buffers
    capacity: int | None,  # the height to reach, at least the load; None is the lowest
    early: np.ndarray,
    deadline: float,
    seed: int,  # of the random choices
    tell: Callable[[int, int], object],  # called with height and bound as they change
) -> tuple[np.ndarray, int]:
    """The lowest layout found, and a height below which there is none."""
    load = least_height(problem)
    goal = load if capacity is None else max(load, capacity)
    chosen = problem.stretches()
    incumbents = [Incumbent(problem.subset(c), goal) for c in chosen]

    def state() -> tuple[int, int]:
        return (
            max((a.height for a in incumbents), default=0),
            max((a.bound for a in incumbents), default=load),
        )

    now = time.monotonic()
    until = now + _ORDERS * (deadline - now)
    for incumbent, c in zip(incumbents, chosen, strict=True):
        incumbent.prove(least_height(incumbent.problem))
        _fit(incumbent, early[c], until)
    tell(*state())
    improvers: dict[int, _Improver] = {}
    while incumbents and time.monotonic() < deadline:
        # Only the highest counts, and it need not go below the bound of another.
        worst = max(incumbents, key=lambda a: a.height)
        worst.goal = max(worst.goal, *(a.bound for a in incumbents))
        if worst.over:
            break
        if id(worst) not in improvers:
            improvers[id(worst)] = _Improver(worst, seed)
        improvers[id(worst)].next(deadline)
        tell(*state())
    offsets = np.zeros(len(problem.size), np.int64)
    for incumbent, c in zip(incumbents, chosen, strict=True):
        offsets[c] = incumbent.offsets
    return offsets, state()[1]


def _fit(incumbent: Incumbent, early: np.ndarray, deadline: float) -> None:
    """Best fit in some orders; in XLA's two even after the deadline."""
    problem = incumbent.problem
    simple = [simple_order(problem, by).tobytes() for by in ("size", "lifetime")]
    for order in orders(problem, early):
        if order.tobytes() in simple or time.monotonic() < deadline:
            fitted = incumbent.fit(order)
            if order.tobytes() == simple[1]:
                incumbent.long = fitted
            if incumbent.over:
                return


class _Improver:
    """Improves one problem, an iteration of search or repair at a time."""

    def __init__(self, incumbent: Incumbent, seed: int):
        self._incumbent, self._seed = incumbent, seed
        self._bottoms: list[BottomStack] = []
        self._kernels: dict[int, KernelSearch] = {}
        self._repairs: dict[int, RepairSearch] = {}
        self._small = len(incumbent.problem.size) <= _SMALL
        which = 0 if self._small else 1
        self._share, self._first = _SHARE[which], _FIRST[which]
        self._spent = [0.0, 0.0]  # seconds of search and of repair

    def next(self, deadline: float) -> None:
        """Runs whichever of search and repair is behind its share of the time."""
        incumbent, begin = self._incumbent, time.monotonic()
        which = self._bottom()
        bottom = self._bottoms[which]
        if which not in self._repairs:
            repair = EjectionRepair(bottom.above, self._seed)
            self._kernels[which] = KernelSearch(incumbent, bottom, repair, self._seed)
            self._repairs[which] = RepairSearch(incumbent, bottom, repair)
        self._first -= 1
        due = self._spent[1] <= self._share * sum(self._spent)
        searched = (self._first >= 0 or not due) and not incumbent.problem.windowed
        if searched:
            self._kernels[which].iterate(deadline)
        else:
            self._repairs[which].iterate(deadline)
        self._spent[0 if searched else 1] += time.monotonic() - begin

    def _bottom(self) -> int:
        """The number of the largest stack that leaves room for a lower height."""
        incumbent = self._incumbent
        if not self._bottoms:
            if not self._small:  # all of a small problem can be searched
                self._bottoms = bottoms(incumbent.problem, incumbent.long)
            self._bottoms.append(no_bottom(incumbent.problem))
        most = incumbent.goal + _ROOM * (incumbent.height - incumbent.goal)
        return next(k for k, b in enumerate(self._bottoms) if b.need <= most)
