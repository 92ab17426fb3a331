"""The least that a scanned model takes, with the host's memory and without it.

    python -m benchmarks.offload

Loss gradients of `benchmarks.blocks`, for an H100, under the least budget that
`jaxmem.schedule` reaches. "recomputes" is in per cent of the forward pass's matmul
flops; "recompute" the milliseconds of that, and of the transfer to the host and back,
as estimated from the chip's rates.
"""

import jaxmem
from benchmarks._common import MIB, MS, publish, size_and_ms
from benchmarks.blocks import TARGET, made, matmul_flops
from benchmarks.budget import MODELS
from jaxmem.scheduling import BudgetError

COLUMNS = (
    "model",
    "offload",
    "temp MiB",
    MS,
    "on the host MiB",
    "recomputes %",
    "recompute ms",
)


def least(step, args, offload: bool):
    """The plan of the least peak."""
    how = {"target": TARGET, "donate_argnums": (), "offload": offload}
    try:
        jaxmem.schedule(step, 1, **how).plan(*args)
    except BudgetError as error:
        room = error.least
    return jaxmem.schedule(step, room, **how).plan(*args)


def row(name: str, offload: bool):
    gradient, model = made(name)
    step, args = gradient(model)
    plan = least(step, args, offload)
    recompute = 300 * plan.recomputed_flops / matmul_flops(step, *args)
    seconds = next(t.seconds for t in plan.tried if t.choice == plan.choice)
    return (
        *(name, "yes" if offload else "no", *size_and_ms(plan.scheduled)),
        *(plan.offloaded_bytes / MIB, recompute, 1e3 * seconds),
    )


if __name__ == "__main__":
    rows = [row(name, offload) for name in MODELS for offload in (False, True)]
    publish("offload", COLUMNS, rows)
