"""What may take fewer bytes in the same time: compiled, until it takes longer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxmem.scheduling._searched import Candidate, Front, Searched, SearchedStep
from jaxmem.scheduling.search.asks import Ask, Search
from jaxmem.scheduling.search.result import ReportedTrial, is_slower
from jaxmem.scheduling.search.trials import Trials


@dataclass(frozen=True)
class NearlyFree:
    """The compiles of a step that ask for nothing else.

    Attributes:
      step: what is searched for.
      passes: those that are asked, in this order.
      trials: what was compiled.
    """

    step: SearchedStep
    passes: Sequence[Searched]
    trials: Trials

    def search(
        self, best: ReportedTrial, front: Front = ()
    ) -> Search[list[ReportedTrial]]:
        """What takes fewer bytes than the best, and no longer once it is compiled.

        `front`: what else would be done to that, until it fits.
        """
        found = []
        plain = replace(best.choice, unchanged=False)
        start = Candidate(plain, self.step.traced.predicted(plain), best.seconds)
        step = replace(self.step, front=[start, *front])
        refused = math.isinf(best.peak)  # it cannot run: what can takes no longer
        for one in self.passes if refused or best.step_seconds is not None else ():
            last = best
            for config in one.nearly_free(step):
                trial = yield Ask(plain.having(config))
                if math.isinf(trial.peak) and math.isinf(last.peak):
                    continue  # so many blocks are not enough
                other = last if front or refused else best
                if trial.peak >= last.peak or self._costs_more(trial, other, front):
                    break  # each of them takes longer than the one before
                found.append(trial)
                if trial.peak <= self.trials.limit < best.peak:
                    break  # it fits, which the best did not
                last = trial
        return found

    def _costs_more(
        self, one: ReportedTrial, other: ReportedTrial, front: Front
    ) -> bool:
        """Whether it is slower, with what of a front takes it to the limit."""
        kept = front[0].bytes if front else 0

        def more(trial: ReportedTrial) -> float:
            over = trial.peak - self.trials.limit if front else 0
            enough = (c.seconds for c in front if kept - c.bytes >= over)
            return min(enough, default=math.inf) if over > 0 else 0.0

        if math.isinf(more(other)):
            return False  # it takes fewer bytes, and that is what is needed
        further = more(one) - more(other)
        return is_slower(one, other, self.step.traced.slack() - further)
