"""A traced step, compiled under several choices until one of them will do."""

import math
import time
from collections.abc import Callable, Iterator

from jaxmem.chips import CHIPS
from jaxmem.memory import CompileError, format_bytes, start_worker
from jaxmem.scheduling import _passes
from jaxmem.scheduling._choice import counted
from jaxmem.scheduling._searched import Searched, SearchedStep
from jaxmem.scheduling.search.compiles import Compiles, OtherOptions, OutOfTime
from jaxmem.scheduling.search.driver import Driver
from jaxmem.scheduling.search.result import (
    BudgetError,
    ReportedTrial,
    SearchResult,
    wrong_values,
)
from jaxmem.scheduling.search.strategy import Strategy
from jaxmem.scheduling.search.traced_step import TracedStep
from jaxmem.scheduling.search.trials import Trials


def search(
    step: TracedStep,
    budget: int | None,
    tell: Callable[[str], None],
    named: bool = False,
    offload: float = 0,
    most: float | None = None,
    tile: bool = False,
    audit: bool = True,
    quick: bool = False,
) -> SearchResult:
    """The choice that fits a budget; without one, the one that takes least."""
    # Without a budget recomputation has to make the step faster. `named`: only what has
    # a `checkpoint_name` is kept. `offload`: bytes of a device that may wait in
    # the host's memory. `tile`: regions may be run in tiles. `audit`: no choice is
    # taken in whose module something is found. `quick`: the first that fits will do.
    # After `most` seconds, or when interrupted, it is the best so far.
    start = time.perf_counter()
    start_worker()
    deadline = None if most is None else time.monotonic() + most
    products, passes = None, _asked(tile and not named)
    while True:
        compiles, trials = Compiles(step.begin, deadline, products), Trials(budget)
        if budget is not None:
            trials.planned = CHIPS[step.target].planned_bytes
        asked = SearchedStep(step, named, offload, left=compiles.left)
        strategy = Strategy(asked, passes, trials, quick)
        try:
            driver = Driver(compiles, trials, tell, audit)
            best, stopped = _best(driver, strategy)
            break
        except BudgetError as error:
            text = "\n".join([str(error), *compiles.notes])
            raise BudgetError(text, error.least) from None
        except OtherOptions as other:  # all once more, so that all are compiled alike
            products = other.products
        finally:
            compiles.close()
    if best.findings:  # even the best computes something else than the step
        raise CompileError(wrong_values(best))
    return SearchResult(
        best.choice,
        budget,
        tuple(trials.tried),
        time.perf_counter() - start,
        step.rewritten(best.choice),
        best.report,
        step.fingerprint,
        products,
        (
            *compiles.notes,
            *_not_taken(trials),
            *((stopped,) if stopped else strategy.notes),
        ),
        stopped=bool(stopped),
    )


def _not_taken(trials: Trials) -> Iterator[str]:
    """A sentence on what was compiled and may compute something else, if anything."""
    wrong = [one for one in trials.tried if one.findings]
    if wrong:
        yield (
            f"{counted(len(wrong))} not taken, since what the compiler made of them "
            f"may have wrong values, the first: {wrong[0].findings[0].what}"
        )


def _asked(tile: bool) -> list[Searched]:
    """The passes that are asked, in order."""
    return [one for one in _passes.searched() if tile or not one.in_parts]


def _best(driver: Driver, strategy: Strategy) -> tuple[ReportedTrial, str]:
    """What was asked for; the best so far, and why, where there is no time for more."""
    try:
        return driver.run(strategy.search()), ""
    except (KeyboardInterrupt, OutOfTime) as stop:
        late, trials = isinstance(stop, OutOfTime), driver.trials
        best = trials.best
        if best is None or math.isinf(best.peak):
            if late:
                raise TimeoutError(_too_late(trials)) from None
            raise
        why = "out of time" if late else "interrupted"
        count = len(trials.tried)
        text = f"the search was {why} after {count} compiles: the best so far"
        return driver.settled(best), text


def _too_late(trials: Trials) -> str:
    count = len(trials.tried)
    least = min((t.peak for t in trials.tried), default=math.inf)
    text = f"search_seconds: nothing that fits was found in {count} compiles"
    if math.isfinite(least):
        text += f"; the lowest peak of them is {format_bytes(least)}"
    return text + ": give it more time"
