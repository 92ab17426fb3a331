"""What was compiled for one budget, and what follows for other predictions."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._searched import Candidate
from jaxmem.scheduling.search.result import ReportedTrial, best_of, by_peak

# Of the budget, by which to stay below what was refused at the end, where the compiler
# does not say what it needs: four tries go down by a fifth.
_REFUSED = 0.05


@dataclass
class Trials:
    """What was compiled, in order.

    Attributes:
      budget: bytes; None where there is none.
      tried: the trials.
      excess: bytes that a step took above what its assigned buffers had told.
      planned: bytes above which XLA recomputes operations unasked; inf once nothing
        was found below.
    """

    budget: int | None
    tried: list[ReportedTrial] = field(default_factory=list)
    excess: int = 0
    planned: float = math.inf

    @property
    def room(self) -> float:
        """What assigned buffers may take."""
        return math.inf if self.budget is None else self.budget - self.excess

    @property
    def limit(self) -> float:
        """What is searched for: within the room, and what XLA leaves as it is."""
        return min(self.room, self.planned)

    @property
    def best(self) -> ReportedTrial | None:
        return best_of(self.tried, self.limit)

    @property
    def least(self) -> ReportedTrial:
        return min(self.tried, key=by_peak)

    def __getitem__(self, choice: Choice) -> ReportedTrial:
        return next(t for t in self.tried if t.choice == choice)

    def settle(self, trial: ReportedTrial) -> None:
        """Takes a trial that was compiled to the end for that which was not."""
        self.tried = [trial if t.choice == trial.choice else t for t in self.tried]

    def missed(self, found: ReportedTrial, settled: ReportedTrial) -> None:
        """Lowers the limit, since what was within it has not fitted in the end."""
        assert self.budget is not None
        if math.isfinite(settled.peak):
            self.excess = int(settled.peak - found.peak)
        elif settled.needed is not None and settled.needed > self.budget:
            self.excess = int(settled.needed - found.peak)
        else:
            more = int(_REFUSED * self.budget)
            self.excess = int(self.budget - found.peak) + more


@dataclass(frozen=True)
class TrialBound:
    """What candidates have to be within, by what was tried.

    Attributes:
      trials: what was tried.
      predicted: bytes of the peak of a choice.
      limit: bytes of a compiled peak that will do.
      seconds: what they have to take less than.
    """

    trials: Trials
    predicted: Callable[[Choice], int]
    limit: float
    seconds: float = math.inf

    @property
    def least(self) -> float:
        return self.trials.least.peak

    def above(self, choice: Choice, unknown: float) -> float:
        """Of the first of the others, where a choice does not fit the chip."""
        own = [t for t in self.trials.tried if t.choice == choice]
        fits = (t for t in (*own, *self.trials.tried) if math.isfinite(t.peak))
        first = next(fits, None)
        return unknown if first is None else first.peak - self.predicted(first.choice)

    def allows(self, one: Candidate) -> bool:
        return one.seconds < self.seconds
