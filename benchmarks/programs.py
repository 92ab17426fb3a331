"""Training steps of many kinds: plain, scheduled, and within a budget.

    python -m benchmarks.programs [word of a program's name]

The peak of a step of `tests/programs`, its state donated, compiled for an H100: as it
is written; as `schedule` leaves it without a budget; and within three fifths of the
plain peak, or the least that `schedule` says it can reach. A program that is not within
that budget after some minutes of search says so. Rows of this jaxmem are kept: it goes
on where it was stopped.
"""

import sys
from functools import partial

import jaxmem
from benchmarks._common import MIB, publish_some, size_and_ms, unless_known
from jaxmem.memory import MemoryReport
from jaxmem.scheduling import BudgetError
from tests.programs import PROGRAMS, Program

FILE, TARGET, SHARE = "programs", "h100", 0.6
COLUMNS = (
    *("program", "plain MiB", "plain: predicted ms"),
    *("scheduled MiB", "scheduled: predicted ms"),
    *("budget MiB", "within", "with the budget MiB", "with the budget: predicted ms"),
)
SEARCH = 180.0  # seconds
NOT_FOUND = "not found"


def scheduled(program: Program, budget: int | None = None, seconds=None):
    """The plan of a program in big."""
    step, args, donated = program.make("big")
    how = {"target": TARGET, "donate_argnums": donated, "progress": False}
    return jaxmem.schedule(step, budget, search_seconds=seconds, **how).plan(*args)


def within(program: Program, budget: int, seconds: float = SEARCH) -> tuple:
    """Whether the budget is kept; MiB of the peak, its ms, or MiB of the least peak."""
    try:
        plan = scheduled(program, budget, seconds)
    except BudgetError as error:
        return "no", error.least / MIB if error.least else "", ""
    except TimeoutError:
        return NOT_FOUND, "", ""
    return "yes", *taken(plan.scheduled)


def taken(report: MemoryReport) -> tuple[float, float]:
    """MiB of the peak, and the predicted ms."""
    return size_and_ms(report, "peak_bytes")


def measure(program: Program) -> list:
    """The cells of a row."""
    plan = scheduled(program)
    cells = *taken(plan.plain), *taken(plan.scheduled)
    print(program, *cells, flush=True)
    budget = int(SHARE * plan.plain.peak_bytes)
    return [*cells, budget / MIB, *within(program, budget)]


if __name__ == "__main__":
    known = lambda p: unless_known(FILE, (p.name,), lambda: measure(p))
    cases = {(p.name,): partial(known, p) for p in PROGRAMS}
    publish_some(FILE, COLUMNS, cases, sys.argv[1:])
