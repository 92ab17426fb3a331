"""Full-size models that others wrote, substituted and scheduled within a budget.

    python -m benchmarks.foreign_budgets [library/model ...] [--chip CHIP ...]

The peak of an Adam step at one batch, state donated, compiled for a chip: as the
library has the model, substituted, and that scheduled within a budget: its arguments,
and half of its temporaries; where a search of some minutes finds nothing that fits,
three quarters of them, then nine tenths. The batch is that of `foreign_published.py`,
which takes up to half of an H100: there XLA recomputes nothing by itself. On an L4 it
is a quarter of it, on a T4 an eighth. The search is without tiles: in a step that is
written out these take minutes more to look for. "Recomputed" is in per cent of the
flops of the forward pass.

A row is written as soon as it is measured; those of this jaxmem are skipped.
"""

import argparse
import sys

import jax

import jaxmem
from benchmarks._common import MS, milliseconds
from benchmarks.blocks import matmul_flops
from benchmarks.foreign_batches import (
    CHIPS,
    dtype_of,
    named,
    publish_rows,
    steps_of,
)
from benchmarks.models.foreign import KEY
from benchmarks.models.foreign_published import Published
from benchmarks.readings.peaks import GIB
from jaxmem.scheduling import BudgetError

FILE = "foreign_budgets"
COLUMNS = (
    *("library", "model", "an example", "chip", "dtype", "batch", "arguments (GiB)"),
    *("plain (GiB)", f"plain: {MS}", "substituted (GiB)", f"substituted: {MS}"),
    *("of the temporaries", "budget (GiB)", "fits", "scheduled (GiB)"),
    *(f"scheduled: {MS}", "recomputed (%)"),
)
SEARCH = 180.0  # seconds
SHARES = (0.5, 0.75, 0.9)  # of the temporaries, until one is found to fit
SHARE = {"h100": 1, "l4": 4, "t4": 8}  # of the batch


def measure(model: Published, chip: str) -> list:
    """The cells of a row."""
    dtype, batch = dtype_of(model, chip), max(1, model.batch // SHARE[chip])
    plain, lean, args = steps_of(model, dtype)
    how = {"target": chip, "donate_argnums": 0}
    before, after = (
        jaxmem.estimate(step, *args(batch), **how) for step in (plain, lean)
    )
    cells = [model.library, model.name, model.example, chip, dtype, batch]
    cells += [after.argument_bytes / GIB]
    for report in (before, after):
        cells += [report.peak_bytes / GIB, milliseconds(report)]
    print(*cells, flush=True)
    flops = forward_flops(model, dtype, batch)
    how |= {"search_seconds": SEARCH, "progress": False, "tile": False}
    found: list = []
    for share in SHARES:
        budget = int(after.peak_bytes - (1 - share) * after.temp_bytes)
        step = jaxmem.schedule(lean, budget, **how)
        found = [share, budget / GIB, *within(step, args(batch), flops)]
        if found[2] == "yes":
            break
    return [*cells, *found]


def within(step: jaxmem.scheduling.Scheduled, args: tuple, flops: float) -> list:
    """Whether the budget is kept, peak and ms, what is recomputed of the flops."""
    try:
        plan = step.plan(*args)
    except BudgetError as error:
        print(error)
        return ["no", (error.least or 0) / GIB, "", ""]
    except TimeoutError as error:
        print(error)
        return ["not found", "", "", ""]
    assert plan.scheduled is not None
    print(*plan.notes, f"{len(plan.tried)} compiles, {plan.planning_seconds:.0f} s")
    size, ms = plan.scheduled.peak_bytes / GIB, milliseconds(plan.scheduled)
    return ["yes", size, ms, 100 * plan.recomputed_flops / flops]


def forward_flops(model: Published, dtype: str, batch: int) -> float:
    """Of the matrix products and convolutions of the plain loss."""
    built = model.build(dtype)
    params, statistics = jax.eval_shape(built.init, jax.random.key(0))
    return batch * matmul_flops(built.loss, params, statistics, built.batch, KEY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", metavar="library/model")
    parser.add_argument("--chip", nargs="*", default=("h100",), choices=CHIPS)
    asked = parser.parse_args()
    sys.argv[1:] = []  # the file is that of all rows
    publish_rows(FILE, COLUMNS, named(asked.models), asked.chip, measure)


if __name__ == "__main__":
    main()
