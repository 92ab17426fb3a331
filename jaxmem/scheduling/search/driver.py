"""What answers a search: compiles, and their trials in order."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxmem.scheduling.search.asks import Ask, Search, T
from jaxmem.scheduling.search.compiles import Compiles
from jaxmem.scheduling.search.result import ReportedTrial, progress_of, trial_of
from jaxmem.scheduling.search.trials import Trials


@dataclass(frozen=True)
class Driver:
    """Compiles what a search asks for.

    Attributes:
      compiles: of the step.
      trials: what was compiled.
      tell: shows a line of progress.
      audit: whether what the compiler made of a choice is looked at.
    """

    compiles: Compiles
    trials: Trials
    tell: Callable[[str], None]
    audit: bool = True

    def run(self, search: Search[T]) -> T:
        """What a search returns."""
        try:
            ask = next(search)
            while True:
                ask = search.send(self._answer(ask))
        except StopIteration as end:
            return end.value

    def settled(self, found: ReportedTrial) -> ReportedTrial:
        """The same compiled to the end."""
        self.tell(f"compile to the end{progress_of(found)}")
        report = self.compiles.settled(found.choice)
        about = found.predicted, found.seconds, self.audit
        best = trial_of(found.choice, report, *about)
        if report is None:
            best = replace(best, needed=self.compiles.needed.get(found.choice))
        self.trials.settle(best)
        return best

    def _answer(self, ask: Ask) -> ReportedTrial | None:
        choices = [ask.choice, *ask.following]
        if ask.ahead:
            self.compiles.ahead(choices)
            return None
        if ask.settled:
            return self.settled(self.trials[ask.choice])
        count = len(self.trials.tried) + 1
        self.tell(f"compile {count}{progress_of(self.trials.best)}")
        self.compiles.ahead(choices)
        about = ask.expected, ask.seconds, self.audit
        trial = trial_of(ask.choice, self.compiles(ask.choice), *about)
        self.trials.tried.append(trial)
        return trial
