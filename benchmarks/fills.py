"""What XLA takes to fill stacks of scanned layers with zeros, and spares on request.

    python -m benchmarks.fills
    python -m benchmarks.fills ViT schedule    # rows that have both; others stay

Loss gradients of `benchmarks.blocks` on an H100: predicted ms as XLA compiles them, the
ms of the kernels that fill stacks which each iteration writes over, and the predicted
ms with XLA's option that leaves them out. MiB are the same with it.
"""

import functools
import sys

import jaxmem
from benchmarks import blocks
from benchmarks._common import publish_some, size_and_ms
from benchmarks.blocks import FUSED, STACKS, TARGET
from jaxmem.memory import MemoryReport
from jaxmem.memory.time.fills import OPTION

HOW = (
    *("plain", "dots_with_no_batch_dims_saveable", "nothing_saveable"),
    *("schedule", "substitute"),
)
COLUMNS = (
    *("model", "how", "temp MiB", "predicted ms", "fills: ms"),
    *("with the option: temp MiB", "with the option: predicted ms"),
)


def filled(report: MemoryReport) -> float:
    """Milliseconds of the kernels that fill stacks; 0 where none are worth saying."""
    notes = [note for note in report.time.notes if OPTION in note]
    return float(notes[0].split()[0]) if notes else 0.0


def row(name: str, how: str) -> tuple:
    gradient, model = blocks.made(name, blocks.POLICIES.get(how))
    step, args = gradient(jaxmem.substitute(model) if how == "substitute" else model)
    plan = blocks.scheduled(step).plan(*args) if how == "schedule" else None

    def report(option: bool) -> MemoryReport:
        options = {"compiler_options": {OPTION: option}}
        if plan is None:
            return jaxmem.estimate(step, *args, target=TARGET, **options)
        # the same plan: `schedule` sets the option unless it is told not to
        own = jaxmem.schedule(step, plan=plan, donate_argnums=(), **options)
        return jaxmem.estimate(own, *args, target=TARGET)

    plain, spared = report(False), report(True)
    return *size_and_ms(plain), filled(plain), *size_and_ms(spared)


def measures() -> dict:
    names = ("BERT-Large, 8 x 512", *STACKS, *FUSED)
    cases = [(name, how) for name in names for how in HOW]
    return {case: functools.partial(row, *case) for case in cases}


if __name__ == "__main__":
    publish_some("fills", COLUMNS, measures(), sys.argv[1:])
