"""In which order the passes' candidates are compiled, and which are not at all."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._searched import Candidate, Searched, SearchedStep
from jaxmem.scheduling.order.shrink_first import ShrinkFirst
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.search.budget import BudgetSearch
from jaxmem.scheduling.search.fronts import Fronts
from jaxmem.scheduling.search.result import BudgetError, ReportedTrial
from jaxmem.scheduling.search.strategy import Strategy
from jaxmem.scheduling.search.trials import Trials
from jaxmem.scheduling.tiling.micro_batches import MicroBatches

PLAIN = Choice("h100")
OWN = 10.0  # seconds of the plain step
FRONT = [
    Candidate(PLAIN, 900, 0.0),
    Candidate(PLAIN.having(Recompute(2.0)), 500, 1.0),
    Candidate(PLAIN.having(Recompute(1.0)), 300, 3.0),
]


class Parts(Searched):
    """A pass that changes the whole step."""

    config = MicroBatches
    in_parts = True
    whole_step = True

    def __init__(self, seconds: float, size: int = 500):
        self.one = Candidate(PLAIN.having(MicroBatches(2)), size, seconds)

    def alone(self, step, bound):
        return [self.one] if bound.allows(self.one) else []

    candidates = alone


class Orders(Searched):
    config = ShrinkFirst

    def __init__(self, seconds: float, size: int):
        self.one = Candidate(PLAIN.having(ShrinkFirst(enabled=True)), size, seconds)

    def candidates(self, step, bound):
        return [self.one]


def search(*passes, limit=620, off=0.0):
    """The choices that are compiled, in order; peaks are 100 above kept bytes."""
    sizes = {c.choice: c for c in [*FRONT, *(one.one for one in passes)]}
    trial = lambda choice: ReportedTrial(
        choice,
        sizes[choice].bytes + 100.0,
        None,
        sizes[choice].seconds,
        OWN + sizes[choice].seconds + off * bool(choice.configs),
    )
    trials = Trials(limit, [trial(PLAIN)])
    traced = SimpleNamespace(
        target="h100",
        slack=lambda: 0.1,
        own_seconds=lambda: OWN,
        predicted=lambda choice: sizes[choice].bytes,
        argument_bytes=lambda: 0,
        rewritten=lambda choice: None,
    )
    asked = Fronts(SearchedStep(traced, limit=limit, front=FRONT), passes, trials)
    running, compiled = asked.search(), []
    try:
        ask = next(running)
        while True:
            compiled.append(ask.choice)
            trials.tried.append(trial(ask.choice))
            ask = running.send(trials.tried[-1])
    except StopIteration as end:
        return end.value.choice, compiled


def test_micro_batches_come_first_where_they_alone_are_faster():
    found, compiled = search(Parts(seconds=0.5))
    assert found == PLAIN.having(MicroBatches(2))
    assert compiled == [found]  # what recomputes is slower by prediction


def test_recomputation_comes_first_where_it_is_faster():
    found, compiled = search(Parts(seconds=2.0))
    assert found == PLAIN.having(Recompute(2.0))
    assert compiled[0] == found


def test_recomputation_is_compiled_where_micro_batches_were_slower_than_predicted():
    found, compiled = search(Parts(seconds=0.5), off=2.0)
    assert found == PLAIN.having(MicroBatches(2))
    assert compiled == [found, PLAIN.having(Recompute(2.0))]


@pytest.mark.parametrize(
    ("size", "seconds", "asked"),
    [(500, 0.5, True), (700, 0.5, False), (500, 1.5, False)],
    ids=["fits, faster", "does not fit", "slower"],
)
def test_once_something_fits_what_is_expected_to_fit_in_less_time(size, seconds, asked):
    one = Orders(seconds, size)
    found, compiled = search(Parts(seconds=5.0), one)
    assert (one.one.choice in compiled) == asked
    assert (found == one.one.choice) == asked


class FewBytes(Searched):
    """A pass that is on by default, and takes a few bytes for its time."""

    config = ShrinkFirst

    def undone(self, step, choice):
        yield from (ShrinkFirst(enabled=True), Recompute(1.0))


@pytest.mark.parametrize(
    ("peaks", "found", "compiles"),
    [((1001, 1000, 0), 1, 1), ((1001, 1001, 999), 2, 2), ((1001,) * 3, None, 2)],
    ids=["a part of it", "none of it", "the plain step"],
)
def test_less_is_done_until_no_more_bytes_are_taken(peaks, found, compiles):
    given = ReportedTrial(replace(PLAIN, unchanged=True), 1000.0, None, 0.0, OWN)
    choices = PLAIN, *(PLAIN.having(c) for c in FewBytes().undone(None, None))
    trials = [
        ReportedTrial(choice, float(peak), None, 0.0, OWN - 1)
        for choice, peak in zip(choices, peaks, strict=True)
    ]
    step = SearchedStep(SimpleNamespace())
    running = Strategy(step, [FewBytes()], Trials(None))._doing_less(trials[0], given)
    asked = []
    try:
        ask = next(running)
        while True:
            asked += [] if ask.settled else [ask.choice]
            ask = running.send(next(t for t in trials if t.choice == ask.choice))
    except StopIteration as end:
        assert end.value is (given if found is None else trials[found])
    assert len(asked) == compiles


@pytest.mark.parametrize(("budget", "fits"), [(395, True), (380, False)])
def test_less_is_done_where_something_nearly_fits(budget, fits):
    """Of a peak of 400 MiB what is left takes 10."""
    mib, less = 2**20, ShrinkFirst(enabled=True)
    front = [replace(one, bytes=mib * one.bytes) for one in FRONT]
    running = BudgetSearch(front, mib * budget, undone=[less]).search()
    asked = []
    try:
        ask = next(running)
        while True:
            asked.append(ask.choice)
            plain = ask.choice.having(ShrinkFirst())
            size = next(c.bytes for c in front if c.choice == plain)
            peak = size + mib * (100.0 - 10 * (plain != ask.choice))
            ask = running.send(ReportedTrial(ask.choice, peak, None, ask.seconds))
    except StopIteration as end:
        assert fits and end.value.choice == FRONT[-1].choice.having(less)
    except BudgetError:
        assert not fits and not any(choice.get(ShrinkFirst).enabled for choice in asked)
