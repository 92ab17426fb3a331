"""One search for every budget: the cheapest sequences, from the plain peak down.

Peaks are aimed at, in steps that depend on the graph alone: from chain plans
(`_remat_chain`), by small steps (`_remat_search`). Every sequence that is met and is
cheaper than all of at most its peak is kept, and a budget takes the cheapest within it.
So the answers are monotone: a smaller budget never has the larger peak, nor the lower
cost.
"""

import bisect
import math
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from jaxmem.planning.remat.chain import chain_plans
from jaxmem.planning.remat.local_search import EvaluatedSequence, RematSearch

LEVELS = 40  # peaks aimed at
LONGEST = 2  # times the operations: longer sequences are not lowered further
WORK = 500.0  # to lower a sequence to the next peak
TRIES = 6  # to improve what is between two peaks
SLACK = 1.2  # what costs this times what is known already is given up
EFFORT = 30_000.0  # of work, quarters of a millisecond or so; chain plans on top
FARTHER = (1, 3, 7, 15, 31)  # sequences above the next one, tried where none is known


class ParetoFront:
    """The cheapest sequences met, by rising peak; of equal costs the shorter.

    Attributes:
      peaks: bytes.
      prices: cost, then length, of each peak's sequence.
      sequences: of each peak.
    """

    def __init__(self):
        self.peaks: list[int] = []
        self.prices: list[tuple[float, int]] = []
        self.sequences: list[np.ndarray] = []

    def __iter__(self) -> Iterator[tuple[int, float, np.ndarray]]:
        """Peak, cost and sequence."""
        costs = (cost for cost, _ in self.prices)
        return zip(self.peaks, costs, self.sequences, strict=True)

    def add(self, state: EvaluatedSequence) -> None:
        self.offer(state.peak, state.cost, state.sequence)

    def offer(self, peak: int, cost: float, sequence: np.ndarray) -> None:
        """Takes a sequence, if nothing within its peak is cheaper."""
        price = (cost, len(sequence))
        at = bisect.bisect_right(self.peaks, peak)
        if at and self.prices[at - 1] <= price:
            return
        start = stop = bisect.bisect_left(self.peaks, peak)
        while stop < len(self.peaks) and self.prices[stop] >= price:
            stop += 1
        self.peaks[start:stop] = [peak]
        self.prices[start:stop] = [price]
        self.sequences[start:stop] = [sequence]

    def cost(self, target: float) -> float:
        """Of the cheapest sequence within the target; infinite if there is none."""
        k = bisect.bisect_right(self.peaks, target)
        return self.prices[k - 1][0] if k else math.inf

    def step(self, target: float) -> tuple[float, float]:
        """Up to where the cheapest within the target is the cheapest, and its cost."""
        k = bisect.bisect_right(self.peaks, target)
        end = self.peaks[k] - 1 if k < len(self.peaks) else target
        return end, self.prices[k - 1][0]

    def within(self, target: float) -> np.ndarray | None:
        """The cheapest sequence within the target."""
        k = bisect.bisect_right(self.peaks, target)
        return self.sequences[k - 1] if k else None

    def above(self, target: float) -> Iterator[np.ndarray]:
        """The sequences with larger peaks than the target, the nearest first."""
        yield from self.sequences[bisect.bisect_right(self.peaks, target) :]


def descend(
    search: RematSearch,
    family: ParetoFront,
    plain: EvaluatedSequence,
    bound: int,
    effort: float,
    progress: Callable[[float], None] | None = None,
) -> None:
    """Fills the family: from the plain peak down to the bound, and up once more.

    Args:
      search: tells the family of every sequence that it evaluates.
      family: what is known.
      plain: every operation once.
      bound: bytes; no sequence has a smaller peak.
      effort: 1 is `EFFORT`.
      progress: is called with the part that is done, from 0 to 1.
    """
    tell = progress or (lambda part: None)
    plans = chain_plans(
        search.tables, search.cost, plain.events, family.cost, search.late
    )
    for sequence in plans:
        search.state(sequence)
    if search.late():
        return
    levels = _LevelSearch(search, family, plain, effort * EFFORT)
    targets = np.geomspace(plain.peak, max(bound, 1), LEVELS)[1:]
    missed, reached = 0, []
    for step, target in enumerate(targets):
        part = (step + 1) / (2 * LEVELS)
        best = levels.visit(target, part)
        if best is None:
            missed += 1
        else:
            levels.before = best
            reached.append(target)
        tell(part)
        if missed == 3 or search.late():
            break
    for step, target in enumerate(reversed(reached)):
        part = 0.5 + (step + 1) / (2 * len(reached))
        if levels.left(1.0) > 0:
            levels.visit(target, part)
            tell(part)
    tell(1.0)


class _LevelSearch:
    """The search at one peak after another.

    Attributes:
      before: a sequence to lower: the best of the level before.
    """

    def __init__(
        self,
        search: RematSearch,
        family: ParetoFront,
        plain: EvaluatedSequence,
        effort: float,
    ):
        self._search, self._family, self._effort = search, family, effort
        self.before, self._begin = plain.sequence, search.work
        self._refined: Counter[tuple[float, float]] = Counter()

    def left(self, part: float) -> float:
        """Work that is left until so much of the effort is spent."""
        return self._begin + self._effort * part - self._search.work

    def visit(self, target: float, part: float) -> np.ndarray | None:
        """The cheapest within a target, from what is known, lowered and improved.

        Args:
          target: bytes.
          part: of the effort, up to which it may be improved.
        """
        search, family, refined = self._search, self._family, self._refined
        best = self._lowered(target)
        if best is None:
            return None
        # Up to the next sequence's peak this one is the best.
        name = end, cost = family.step(target)
        if refined[name] < TRIES and cost > 0:
            search.refine(search.state(best), end, self.left(part), refined[name])
            refined[name] += 1
        return family.within(end)

    def _lowered(self, target: float) -> np.ndarray | None:
        """The cheapest sequence within the target, from those around."""
        search, family = self._search, self._family
        below = family.within(target)
        if below is not None:
            search.cheapen(search.state(below), target)
        count = len(search.cost)
        longest, work = max(LONGEST * count, 1500), WORK + count / 8
        for sequence in self._starts(target):
            if len(sequence) <= longest:
                most = SLACK * family.cost(target)
                state = search.state(sequence)
                lowered = search.lower(state, target, longest, most, work)
                if lowered.peak <= target:
                    search.cheapen(lowered, target)
        return family.within(target)

    def _starts(self, target: float) -> list[np.ndarray]:
        """Sequences to lower: the next one above, that of the level before, more."""
        above = list(self._family.above(target))
        found = above[:1]
        if not found or found[0] is not self.before:
            found.append(self.before)
        if math.isinf(self._family.cost(target)):
            found += [above[k] for k in FARTHER if k < len(above)]
        return found
