"""Steps for a pod, compiled without one: 256 TPU v5e, or 64 H100, in their memory.

    python -m benchmarks.pod                    # every step on both
    python -m benchmarks.pod h100 70B           # rows that have both; others stay

MiB are of one device, and what one sends in a step. The compiler for TPU refuses a step
that does not fit; that for GPU does not, and tells what it would take. "checkpoint" is
a `jax.checkpoint` around each layer, which keeps nothing but its input. Recomputed are
the flops of matrix products, in % of the plain step's, by the step's equations. For TPU
what a search settles on is compiled to the end, which takes most of its seconds. With
"offload=True" residuals may take 40 GB of the host's memory for each device.
"""

import functools
import os
import sys
import tempfile
from collections.abc import Sequence

import jax

import jaxmem
from benchmarks._common import MIB, MS, TOO_LARGE, publish_some, size_and_ms
from benchmarks.steps.pod import EXPERT, FSDP, STEPS, TENSOR, mesh_of, step_of
from benchmarks.steps.tiles import Made
from jaxmem.cost.equations import flops
from jaxmem.memory import DoesNotFit, MemoryReport

BUDGETS = {"tpu-v5e": "15.75GiB", "h100": "78GiB"}
# Examples of all devices: in tensor parallelism a device has more of them at one time.
BATCHES = {
    "tpu-v5e": {FSDP: 256, TENSOR: 64, EXPERT: 256},
    "h100": {FSDP: 256, TENSOR: 64, EXPERT: 256},
}
TIMEOUT = 1200.0  # seconds of a compile
COLUMNS = (
    *("step", "chip", "devices", "batch", "plain MiB", f"plain: {MS}", "sent MiB"),
    *("checkpoint MiB", f"checkpoint: {MS}", "recomputed %", "sent checkpoint MiB"),
    *("budget", "scheduled MiB", f"scheduled: {MS}"),
    *("recomputed scheduled %", "recomputed scheduled s"),
    *("sent scheduled MiB", "compiles", "search s"),
)


# what a search is given beside the budget, by (step, chip); the step is that before ":"
HOST_BUDGET = "40GB"  # a v5e's share of its host's memory is 48
HOSTED = {
    ("Llama-70B, FSDP: offload=True", "tpu-v5e"): {
        "offload": True,
        "host_budget": HOST_BUDGET,
    }
}


def products(made: Made) -> float:
    """Flops of the matrix products of a step, on all devices."""
    return sum(map(flops, jax.make_jaxpr(made.step)(*made.args).eqns))


def estimated(made: Made, chip: str) -> MemoryReport | None:
    """The report; None where the compiler refuses the step."""
    how = {"target": chip, "donate_argnums": made.donate, "timeout": TIMEOUT}
    try:
        return jaxmem.estimate(made.step, *made.args, **how)
    except DoesNotFit:
        return None


def cells(report: MemoryReport | None) -> tuple[float | str, ...]:
    """MiB of the peak, predicted milliseconds, and MiB sent."""
    if report is None:
        return TOO_LARGE, "", ""
    return *size_and_ms(report, "peak_bytes"), report.sent_bytes / MIB


def row(name: str, chip: str) -> Sequence:
    model, way = STEPS[name.split(":")[0]]
    batch = BATCHES[chip][way]
    made = functools.partial(step_of, model, way, chip, batch)
    plain, checkpoint = made(), made(write=jax.checkpoint)
    work, devices = products(plain), mesh_of(way, chip).size
    twice = 100 * (products(checkpoint) / work - 1)
    peak, ms, sent = cells(estimated(checkpoint, chip))
    how = {"target": chip, "donate_argnums": plain.donate, "progress": False}
    how |= HOSTED.get((name, chip), {})
    scheduled = jaxmem.schedule(plain.step, BUDGETS[chip], **how)
    plan = scheduled.plan(*plain.args)
    *found, sent_then = cells(plan.scheduled)
    more = 100 * devices * plan.recomputed_flops / work
    asked = BUDGETS[chip], *found, more, plan.recomputed_seconds, sent_then
    search = len(plan.tried), plan.planning_seconds
    before = *cells(plan.plain), peak, ms, twice, sent
    return devices, batch, *before, *asked, *search


def main() -> None:
    keys = [*HOSTED, *((name, chip) for chip in BUDGETS for name in STEPS)]
    cases = {key: functools.partial(row, *key) for key in keys}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAXMEM_CACHE_DIR"] = folder  # a search compiles, as the first does
        publish_some("pod", COLUMNS, cases, sys.argv[1:])


if __name__ == "__main__":
    main()
