"""Models that others wrote: their library's own recomputation, and `schedule`.

    python -m benchmarks.foreign_checkpoints [library/model ...]

Transformers has `gradient_checkpointing=True`, and tunix `remat_config=BLOCK`: each
layer under `jax.checkpoint`. The peak of an Adam step on an H100, state donated: as the
library has the model, with that option, with it after `substitute`, and, without it,
substituted and scheduled in the bytes of the latter. "ratio": the predicted time of the
scheduled step over that of the option after `substitute`.

A row is written as soon as it is measured; those of this jaxmem are skipped.
"""

import sys
from collections.abc import Callable
from dataclasses import replace

import jaxmem
from benchmarks._common import MS, milliseconds
from benchmarks.foreign_batches import dtype_of, named, publish_rows, steps_of
from benchmarks.models.foreign_published import Published
from benchmarks.readings.peaks import GIB
from jaxmem.memory import MemoryReport
from jaxmem.scheduling import BudgetError

FILE, CHIP = "foreign_checkpoints", "h100"
WAYS = ("plain", "own option", "own option, substituted", "scheduled")
COLUMNS = (
    *("library", "model", "an example", "chip", "dtype", "batch"),
    *(column for way in WAYS for column in (f"{way} (GiB)", f"{way}: {MS}")),
    *("ratio", "compiles", "seconds"),
)


def measure(model: Published, chip: str) -> list:
    """The cells of a row."""
    dtype, how = dtype_of(model, chip), {"target": chip, "donate_argnums": 0}
    plain, lean, args = steps_of(model, dtype)
    own = replace(model, build=model.checkpointed)
    option, both, _ = steps_of(own, dtype)
    given = args(model.batch)
    cells = [model.library, model.name, model.example, chip, dtype, model.batch]
    reports = [jaxmem.estimate(step, *given, **how) for step in (plain, option, both)]
    for report in reports:
        cells += [report.peak_bytes / GIB, milliseconds(report)]
    return cells + scheduled(lean, given, reports[-1], how)


def scheduled(lean: Callable, given: tuple, theirs: MemoryReport, how: dict) -> list:
    """Peak and ms within the bytes of a report, the ratio, compiles and seconds."""
    step = jaxmem.schedule(lean, theirs.peak_bytes, progress=False, **how)
    try:
        plan = step.plan(*given)
    except BudgetError as error:
        print(error)
        return [(error.least or 0) / GIB, "", "out of reach", "", ""]
    found, tried = plan.scheduled, len(plan.tried)
    assert found is not None and found.seconds and theirs.seconds
    ratio = found.seconds / theirs.seconds
    size = [found.peak_bytes / GIB, milliseconds(found)]
    return [*size, f"{ratio:.3f}", tried, plan.planning_seconds]


def main() -> None:
    models = [one for one in named(sys.argv[1:]) if one.checkpointed]
    sys.argv[1:] = []  # the file is that of all rows
    publish_rows(FILE, COLUMNS, models, [CHIP], measure)


if __name__ == "__main__":
    main()
