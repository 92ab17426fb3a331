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
from benchmarks._common import MIB, publish_some, unless_known
from jaxmem.scheduling import BudgetError
from tests.programs import PROGRAMS, Program

FILE, TARGET, SHARE = "programs", "h100", 0.6
COLUMNS = (
    *("program", "plain MiB", "scheduled MiB"),
    *("budget MiB", "within", "with the budget MiB"),
)
SEARCH = 180.0  # seconds
NOT_FOUND = "not found"


def scheduled(program: Program, budget: int | None = None, seconds=None):
    """The plan of a program in big."""
    step, args, donated = program.make("big")
    how = {"target": TARGET, "donate_argnums": donated, "progress": False}
    return jaxmem.schedule(step, budget, search_seconds=seconds, **how).plan(*args)


def within(program: Program, budget: int, seconds: float = SEARCH) -> tuple[str, int]:
    """Whether the budget is kept, and the peak that is reached or the least."""
    try:
        plan = scheduled(program, budget, seconds)
    except BudgetError as error:
        return "no", error.least or 0
    except TimeoutError:
        return NOT_FOUND, 0
    return "yes", plan.scheduled.peak_bytes


def measure(program: Program) -> list:
    """The cells of a row."""
    plan = scheduled(program)
    plain, ours = plan.plain.peak_bytes, plan.scheduled.peak_bytes
    print(program, plain / MIB, ours / MIB, flush=True)
    budget = int(SHARE * plain)
    said, peak = within(program, budget)
    return [plain / MIB, ours / MIB, budget / MIB, said, peak / MIB if peak else ""]


def main() -> None:
    known = lambda p: unless_known(FILE, (p.name,), lambda: measure(p))
    cases = {(p.name,): partial(known, p) for p in PROGRAMS}
    publish_some(FILE, COLUMNS, cases, sys.argv[1:])


if __name__ == "__main__":
    main()
