"""From a layout to a lower one, until the deadline.

Small problems are searched exactly (`exact`). Of a large one only the kernel is, the
buffers alive where memory is fullest; the others have room and follow by best fit.
Finally, layouts are repaired (`repair`) under a height between the lowest and the best.
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
    problem: LayoutProblem,
    capacity: int | None,  # the height to reach, at least the load; None is the lowest
    early: np.ndarray,  # (buffers,) whether to place it first in one of the layouts
    deadline: float,  # of `time.monotonic`; XLA's two layouts are computed in any case
    seed: int,  # of the random choices
    tell: Callable[[int, int], object],  # called with height and bound as they change
) -> tuple[np.ndarray, int]:
    """The lowest layout found, and a height below which there is none."""
    # Each stretch of time with nothing alive at its ends is laid out by itself.
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
        # A buffer of which a part is in use counts as a whole in a search, so that with
        # windows nothing would be proven: they are repaired alone.
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
