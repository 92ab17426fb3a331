"""Bytes a device of sharded steps: predicted, compiled, and what devices send.

    python -m benchmarks.devices                   # every step on every chip
    python -m benchmarks.devices h100 pinned       # rows that have both; others stay

Eight devices. A prediction compiles nothing: "off %" is of the compiled peak of one
device. "sent" is what a device sends in a step, "predicted ms" what the compiled step
is predicted to take. Steps are scheduled without a budget
for an H100 alone: a compile for TPU takes minutes.
"""

import functools
import sys
from collections.abc import Sequence

import jaxmem
from benchmarks._common import MIB, MS, milliseconds, publish_some
from benchmarks.models import on_a_mesh as parallel_models
from benchmarks.steps import devices as device_steps
from jaxmem.scheduling import predict

CHIPS = ("h100", "tpu-v5p")
STEPS = device_steps.STEPS | parallel_models.STEPS
TIMEOUT = 3000.0  # seconds of a compile
COLUMNS = (
    *("step", "chip", "compiled MiB", f"compiled: {MS}", "predicted MiB", "off %"),
    *("sent MiB", "scheduled MiB", f"scheduled: {MS}", "predicted scheduled MiB"),
    *("off scheduled %", "sent scheduled MiB"),
)


def off(predicted: float, peak: float) -> float:
    """By how much a prediction is off, in %."""
    return 100 * (predicted / peak - 1)


def row(name: str, chip: str) -> Sequence:
    made = STEPS[name](chip)
    how = {"target": chip, "donate_argnums": made.donate}
    predicted = predict(made.step, *made.args, **how).peak_bytes
    plain = jaxmem.estimate(made.step, *made.args, **how, timeout=TIMEOUT)
    peak, sent = plain.peak_bytes, plain.sent_bytes
    cells = peak / MIB, milliseconds(plain), predicted / MIB, off(predicted, peak)
    if chip != "h100":
        return *cells, sent / MIB, "", "", "", "", ""
    plan = jaxmem.schedule(made.step, **how, progress=False).plan(*made.args)
    assert plan.scheduled is not None  # it fits an H100, or the plain step would not
    after, expected = plan.scheduled.peak_bytes, plan.predicted_bytes
    ms, sent_then = milliseconds(plan.scheduled), plan.scheduled.sent_bytes
    more = after / MIB, ms, expected / MIB, off(expected, after), sent_then / MIB
    return *cells, sent / MIB, *more


def main() -> None:
    cases = {
        (name, chip): functools.partial(row, name, chip)
        for chip in CHIPS
        for name in STEPS
    }
    publish_some("devices", COLUMNS, cases, sys.argv[1:])


if __name__ == "__main__":
    main()
