"""One search for every budget: the cheapest sequences, from the plain peak down.

It keeps every sequence that is cheaper than all others within its peak, so that the
answers are monotone: a smaller budget never has the larger peak, nor the lower cost.
"""

import math
from collections import Counter
from collections.abc import Callable

import numpy as np

from jaxmem.planning.remat.chain import chain_plans
from jaxmem.planning.remat.frontier import ParetoFront
from jaxmem.planning.remat.local_search import EvaluatedSequence, RematSearch

LEVELS = 40  # peaks aimed at
LONGEST = 2  # times the operations: longer sequences are not lowered further
WORK = 500.0  # to lower a sequence to the next peak
TRIES = 6  # to improve a sequence between two peaks
SLACK = 1.2  # times the known cost: a sequence that costs more is abandoned
EFFORT = 30_000.0  # of work at effort 1; chain plans come on top
FARTHER = (1, 3, 7, 15, 31)  # sequences above the next one, tried where none is known
MISSES = 3  # targets out of reach after which the descent stops


def descend(
    search: RematSearch,  # tells the front of every sequence that it evaluates
    front: ParetoFront,
    plain: EvaluatedSequence,  # every operation once
    bound: int,  # bytes; no sequence has a smaller peak
    effort: float,  # in units of `EFFORT`
    tell: Callable[[float], object],  # the fraction that is done
) -> None:
    """Fills the front from the plain peak down to the bound, then upwards."""
    plans = chain_plans(
        search.tables, search.cost, plain.events, front.cost, search.late
    )
    for sequence in plans:
        search.state(sequence)
    if search.late():
        return
    levels = _LevelSearch(search, front, plain, effort * EFFORT)
    targets = np.geomspace(plain.peak, max(bound, 1), LEVELS)[1:]
    missed, reached = 0, []
    for step, target in enumerate(targets):
        fraction = (step + 1) / (2 * LEVELS)
        best = levels.visit(target, fraction)
        if best is None:
            missed += 1
        else:
            levels.before = best
            reached.append(target)
        tell(fraction)
        if missed == MISSES or search.late():
            break
    for step, target in enumerate(reversed(reached)):
        fraction = 0.5 + (step + 1) / (2 * len(reached))
        if levels.left(1.0) > 0:
            levels.visit(target, fraction)
            tell(fraction)
    tell(1.0)


class _LevelSearch:
    """The search at one peak after another."""

    def __init__(self, search, front, plain: EvaluatedSequence, effort: float):
        self._search: RematSearch = search
        self._front: ParetoFront = front
        self._effort = effort
        self.before = plain.sequence  # the best of the previous level, lowered further
        self._begin = search.work
        self._refined: Counter[tuple[float, float]] = Counter()

    def left(self, fraction: float) -> float:
        """Work that is left until this fraction of the effort is spent."""
        return self._begin + self._effort * fraction - self._search.work

    def visit(self, target: float, fraction: float) -> np.ndarray | None:
        """The cheapest sequence within the target, by this fraction of the effort."""
        search, front, refined = self._search, self._front, self._refined
        best = self._lowered(target)
        if best is None:
            return None
        # This sequence is the best up to the next one's peak: refine each such step
        # a few times only, with a new seed each time.
        name = end, cost = front.step(target)
        if refined[name] < TRIES and cost > 0:
            search.refine(search.state(best), end, self.left(fraction), refined[name])
            refined[name] += 1
        return front.within(end)

    def _lowered(self, target: float) -> np.ndarray | None:
        """The cheapest sequence within the target, from those with nearby peaks."""
        search, front = self._search, self._front
        below = front.within(target)
        if below is not None:
            search.cheapen(search.state(below), target)
        count = len(search.cost)
        longest, work = max(LONGEST * count, 1500), WORK + count / 8
        for sequence in self._starts(target):
            if len(sequence) <= longest:
                most = SLACK * front.cost(target)
                state = search.state(sequence)
                lowered = search.lower(state, target, longest, most, work)
                if lowered.peak <= target:
                    search.cheapen(lowered, target)
        return front.within(target)

    def _starts(self, target: float) -> list[np.ndarray]:
        """Sequences to lower: the next above, the previous level's, some farther."""
        above = list(self._front.above(target))
        starts = above[:1]
        if not starts or starts[0] is not self.before:
            starts.append(self.before)
        if math.isinf(self._front.cost(target)):
            starts += [above[k] for k in FARTHER if k < len(above)]
        return starts
