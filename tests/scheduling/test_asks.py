"""What a search asks for after its next compile, foreseen by going through it again."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxmem.scheduling import BudgetError, Choice
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.search.asks import Ask, foreseen
from jaxmem.scheduling.search.result import ReportedTrial
from jaxmem.scheduling.search.strategy import is_no_worse

BUDGET = 100
FIRST, FITS, MISSES, LAST = (Choice("cpu", (Recompute(float(r)),)) for r in range(4))


def search(expected, after):
    """Asks for one choice, then for one that depends on its peak, then for the last."""
    trial = yield Ask(FIRST, expected=expected)
    yield Ask(after[trial.peak <= BUDGET], expected=BUDGET + 1.0)
    yield Ask(LAST)
    return trial.peak


def told(asked, peaks):
    """(choices and what was foreseen after each, what the search returns)."""
    ask, seen = next(asked), []
    for peak in peaks:
        seen.append((ask.choice, ask.following))
        try:
            ask = asked.send(ReportedTrial(ask.choice, peak, None, 0.0))
        except StopIteration as end:
            return seen, end.value
    raise AssertionError("it asks for more")


@pytest.mark.parametrize(
    ("expected", "following"), [(None, FITS), (BUDGET, FITS), (BUDGET + 1.0, MISSES)]
)
@pytest.mark.parametrize(("peak", "then"), [(90.0, FITS), (110.0, MISSES)])
def test_what_follows_if_the_next_compile_is_as_expected(
    expected, following, peak, then
):
    begin = lambda: search(expected, {True: FITS, False: MISSES})
    seen, best = told(foreseen(begin, BUDGET), [peak, 0.0, 0.0])
    assert seen == [(FIRST, (following,)), (then, (LAST,)), (LAST, ())]
    assert best == peak


def test_a_search_that_would_end_is_foreseen_as_if_it_did_not_fit():
    def begin():
        trial = yield Ask(FIRST)
        if trial.peak > BUDGET:
            yield Ask(LAST)
            raise BudgetError("none")

    assert told(foreseen(begin, BUDGET), [90.0])[0] == [(FIRST, (LAST,))]
    asked = foreseen(begin, BUDGET)
    next(asked)
    trial = lambda choice: ReportedTrial(choice, 110.0, None, 0.0)
    # after the last nothing is foreseen, and its error is that of the search
    assert asked.send(trial(FIRST)).following == ()
    with pytest.raises(BudgetError, match="none"):
        asked.send(trial(LAST))


@pytest.mark.parametrize(
    ("peak", "sent", "seconds", "wanted"),
    [
        (90.0, 1000, 2.0, True),  # slower, and what it sends is no more
        (90.0, 1001, 0.9, True),  # a little more is sent, in less time
        (90.0, 1001, 1.1, False),
        (90.0, 1001, None, False),  # nobody knows what sending it costs
        (90.0, 1100, 0.9, False),
        (101.0, 900, 0.9, False),
    ],
)
def test_what_is_no_worse_than_the_step_as_it_is(peak, sent, seconds, wanted):
    def trial(peak, sent, seconds):
        report: Any = SimpleNamespace(sent_bytes=sent)
        return ReportedTrial(FITS, peak, None, 0.0, seconds, report)

    assert is_no_worse(trial(peak, sent, seconds), trial(100.0, 1000, 1.0)) == wanted
