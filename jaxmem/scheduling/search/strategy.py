"""Which choices a search compiles, and when it has found what was asked for.

It asks the passes for candidates, and who drives it for compiles.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxmem.memory import format_bytes
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._searched import (
    Front,
    Searched,
    SearchedStep,
    having,
    start_of,
)
from jaxmem.scheduling.search.asks import Ask, Search
from jaxmem.scheduling.search.fronts import Fronts
from jaxmem.scheduling.search.nearly_free import NearlyFree
from jaxmem.scheduling.search.result import (
    BudgetError,
    ReportedTrial,
    best_of,
    by_peak,
    by_peak_and_time,
    is_slower,
    unreachable,
)
from jaxmem.scheduling.search.trials import Trials

# Compiles to the end for one budget: on a TPU they may take more than was assigned.
_CONFIRMED = 4
# Of what devices send: so much more is no reason to leave a step as it is where it
# saves time. A pipeline that is computed in another order sends 0.004 % more.
_SENT = 0.01


@dataclass
class Strategy:
    """A search.

    Attributes:
      step: what is searched for.
      passes: those that are asked, in this order.
      trials: what was compiled, kept by who drives the search.
      quick: whether the first that fits will do.
      notes: what there is to say of how it ended.
    """

    step: SearchedStep
    passes: Sequence[Searched]
    trials: Trials
    quick: bool = False
    notes: tuple[str, ...] = ()

    def search(self) -> Search[ReportedTrial]:
        """What was asked for."""
        budget = self.trials.budget
        return self._least() if budget is None else self._within(budget)

    def _least(self) -> Search[ReportedTrial]:
        """What is no worse than the step as it was given.

        Of that the least bytes times seconds (the least bytes, where no seconds are
        predicted); what costs no time by its pass only where it compiles to no more,
        and what recomputes only where it is faster than what does not.
        """
        given, fronts = replace(self._plain, unchanged=True), self._faster()
        firsts = [front[0].choice for front in fronts]
        yield from self._compiled([self._plain, *self._at_no_cost, *firsts, given])
        faster = [*firsts, *(yield from self._second(fronts))]
        own = self.trials[given]
        tried = self._no_slower(own, faster)
        smaller = yield from self._nearly_free.search(tried[0])
        plain = yield from self._settled(own)
        tried = [plain if t.choice == given else t for t in [*smaller, *tried]]
        by_worth = sorted(tried, key=by_peak_and_time(tried))
        for one in by_worth:
            if one is plain:
                break
            found = yield from self._settled(one)
            if is_no_worse(found, plain):
                return found
        return (yield from self._doing_less(by_worth[0], plain))

    def _doing_less(
        self, best: ReportedTrial, plain: ReportedTrial
    ) -> Search[ReportedTrial]:
        """The best with less of what takes a few bytes for its time; else the plain."""
        passes = () if best is plain else self.passes
        for config in (c for one in passes for c in one.undone(self.step, best.choice)):
            trial = yield Ask(best.choice.having(config), best.seconds)
            better = min([trial, plain], key=by_peak_and_time([trial, plain])) is trial
            if better and is_no_worse(trial, plain):
                found = yield from self._settled(trial)
                if is_no_worse(found, plain):
                    return found
        return plain

    def _no_slower(
        self, own: ReportedTrial, faster: Sequence[Choice]
    ) -> list[ReportedTrial]:
        """What was compiled, the best first; `faster`: choices that have to be."""
        tried = sorted(self.trials.tried, key=by_peak_and_time(self.trials.tried))
        free = self._at_no_cost
        worse = lambda t: t.choice in free and is_slower(t, own, self._slack)
        tried = [t for t in tried if not worse(t)]
        first = next(t for t in tried if t.choice not in faster)
        slower = lambda t: t.choice in faster and best_of([first, t]) is first
        return [t for t in tried if not slower(t)]

    def _on_nearly_free(self) -> Search[bool]:
        """Whether what may cost no time will do; if not, a search goes on from it."""
        trials, front = self.trials, self.step.front
        start = trials.best or trials[front[0].choice]
        smaller = yield from self._nearly_free.search(start, front)
        if trials.best and not is_slower(trials.best, start, self._slack):
            return True
        above = [t for t in smaller if t.peak > trials.limit]
        if above:
            base = above[-1].choice.configs
            self.step = replace(self.step, base=base, front=having(base, front))
        return False

    def _within(self, budget: int) -> Search[ReportedTrial]:
        """What fits once it is compiled to the end."""
        for _ in range(_CONFIRMED):
            try:
                yield from self._within_limit()
            except BudgetError:
                if self.trials.limit == self.trials.room:
                    break
                self.trials.planned = math.inf
                continue
            found = best_of(self.trials.tried, self.trials.room)
            assert found is not None
            best = yield from self._settled(found)
            if best.peak <= budget:
                self._explain_limit(best)
                return best
            self.trials.missed(found, best)
        best = yield from self._least_settled()
        if best.peak <= budget:
            return best
        made = self.step.traced.rewritten(best.choice)
        why = (text for one in self.passes for text in one.unreached(self.step, made))
        raise unreachable(budget, best, tuple(dict.fromkeys(why)))

    def _explain_limit(self, found: ReportedTrial) -> None:
        """Says why part of the budget is not used, where it is for XLA's sake."""
        planned = self.trials.planned
        if found.peak <= planned < self.trials.room:
            text = (
                f"in a step above {format_bytes(planned)} XLA recomputes operations "
                "unasked: no more of the budget is used"
            )
            self.notes = (*self.notes, text)

    def _least_settled(self) -> Search[ReportedTrial]:
        """The least of what was tried, all that may be it compiled to the end."""
        best, seen = None, set()
        for one in sorted(self.trials.tried, key=by_peak):
            if best is not None and one.peak >= best.peak:
                break
            if one.peak not in seen:  # of those that are alike to the byte, the first
                seen.add(one.peak)
                found = yield from self._settled(one)
                best = min(found, best or found, key=by_peak)
        assert best is not None
        return best

    def _settled(self, found: ReportedTrial) -> Search[ReportedTrial]:
        about = found.choice, found.seconds, found.predicted
        return (yield Ask(*about, settled=True))

    def _compiled(self, choices: Sequence[Choice]) -> Search[None]:
        """These, until one of them is within the limit."""
        for i, choice in enumerate(choices):
            trial = yield Ask(choice, following=tuple(choices[i + 1 : i + 2]))
            if trial.peak <= self.trials.limit < math.inf:
                return

    @functools.cached_property
    def _plain(self) -> Choice:
        return Choice(self.step.target)

    @property
    def _slack(self) -> float:
        return self.step.traced.slack()

    @property
    def _nearly_free(self) -> NearlyFree:
        return NearlyFree(self.step, self.passes, self.trials)

    @functools.cached_property
    def _free(self) -> list[tuple[Searched, Any]]:
        """Configurations that cost nothing."""
        return [(one, c) for one in self.passes for c in one.free(self.step)]

    @property
    def _at_no_cost(self) -> list[Choice]:
        """The step under each of them alone."""
        return [self._plain.having(config) for _, config in self._free]

    def _faster(self) -> list[Front]:
        """Where what takes less time than to keep all starts, if anything does."""
        if self.step.named:
            return []
        front = start_of(self.step, self.passes)
        if not front or front[0].seconds >= -self._slack:
            return []
        return [front, *filter(None, [self._other_form()])]

    def _second(self, fronts: Sequence[Front]) -> Search[list[Choice]]:
        """What keeps less than the fastest that was compiled: it may take as long."""
        firsts = {front[0].choice: front for front in fronts}
        best = best_of([t for t in self.trials.tried if t.choice in firsts])
        second = [] if best is None else firsts[best.choice][1:2]
        for one in second:
            yield Ask(one.choice, one.seconds)
        return [one.choice for one in second]

    def _within_limit(self) -> Search[None]:
        """Tries what may be fastest until the assigned buffers are within the limit."""
        trials = self.trials
        trials.tried, limit = [], trials.limit
        self.step = replace(self.step, limit=limit, base=(), front=())
        if not self.quick:
            yield from self._freely()
        if trials.best is None:
            self.step = replace(self.step, front=self._front())
        in_parts = any(one.in_parts for one in self.passes)
        if in_parts and not trials.tried and not self.quick:
            yield from self._first_trial()
        if trials.tried and (yield from self._on_nearly_free()):
            return
        free = [c for one, c in self._free if one.anywhere]
        first = self.step.front[0].choice
        every = ([*one.undone(self.step, first)] for one in self.passes)
        undone = [configs[-1] for configs in every if configs]
        fronts = Fronts(self.step, self.passes, trials, free, undone, self.quick)
        yield from fronts.search()
        self.notes = fronts.notes

    def _freely(self) -> Search[None]:
        """What costs nothing, where that is more than what any candidate can have."""
        if all(one.anywhere for one, _ in self._free):
            return
        yield Ask(self._plain, ahead=True)  # it is compiled while others are looked at
        free = [config for one, config in self._free if not one.is_vain(self.step)]
        yield from self._compiled([self._plain, *map(self._plain.having, free)])
        if self.trials[self._plain].peak <= self.trials.limit:
            for choice in self._at_no_cost:  # any of them may be faster
                yield Ask(choice)

    def _front(self) -> Front:
        """Where the search starts; first what is best of what costs nothing."""
        base, best = self._plain, None
        if self.trials.tried:
            best = self.trials.least.choice
            kinds = {one.config for one in self.passes if one.for_all}
            base = base.having(*(c for c in best.configs if type(c) in kinds))
        found: Front = []
        for one in self.passes:
            found = one.front(self.step, base) or found
            if len(found) > 1:  # else the lists are in loops over micro-batches
                break
        if best is None:
            return found
        return [replace(found[0], choice=best), *found[1:]]

    def _first_trial(self) -> Search[None]:
        """What is fastest by prediction; where that fits, what keeps all as well."""
        first = self.step.front[0]
        trial = yield Ask(first.choice, first.seconds)
        other = self._other_form()
        if other and math.isfinite(trial.peak):
            again = yield Ask(other[0].choice, other[0].seconds)
            if best_of([trial, again]) is again:
                self.step = replace(self.step, front=other)
        if self.trials.best is not None and first.seconds < 0:
            yield Ask(self._plain)  # that it is slower was predicted

    def _other_form(self) -> Front:
        found = (one.other_form(self.step) for one in self.passes)
        return next(filter(None, found), ())


def is_no_worse(one: ReportedTrial, given: ReportedTrial) -> bool:
    """Whether it takes no more bytes, and sends no more, or little in less time."""
    if one.peak > given.peak:
        return False
    if one.sent_bytes <= given.sent_bytes:
        return True
    if one.sent_bytes > (1 + _SENT) * given.sent_bytes:
        return False
    took, plain = one.step_seconds, given.step_seconds
    return took is not None and plain is not None and took <= plain
