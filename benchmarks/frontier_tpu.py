"""Milliseconds over MiB on a TPU v5e, timed by the compiler's own cycles.

    python -m benchmarks.frontier_tpu
    python -m benchmarks.frontier_tpu ViT saveable   # rows that have both; others stay

Six of the models of `benchmarks.frontier`, JAX's policies, and `schedule` in as many
bytes. The search goes by our predicted seconds; what it hands out, and each policy, is
compiled to the end, and timed by the cycles that libtpu writes into the module
(`benchmarks.time`; it writes none for asynchronous copies).
"""

import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import jaxmem
from benchmarks._common import MIB, peak_with, publish_some
from benchmarks.blocks import POLICIES
from benchmarks.frontier import COLUMNS as OF_GPU
from benchmarks.frontier import MODELS, WITHOUT, planned
from benchmarks.readings.xla_costs import Costed
from benchmarks.time import estimated
from benchmarks.tpu_cycles import compiled_text
from jaxmem.chips import compiler_folders
from jaxmem.memory import DoesNotFit

CHIP = "tpu-v5e"
CHOSEN = (
    "BERT-Large, 8 x 512",
    "GPT-2 medium, 4 x 1024",
    "ViT-L, 16 x 256",
    "Llama-1B blocks, 2 x 2048",
    "graph network, 400,000 edges",
    "LSTM, 4,096 steps of 64 x 512",
)
NO_FIT = "does not fit"
COLUMNS = tuple(name.replace("predicted ms", "ms by cycles") for name in OF_GPU)


def milliseconds(step: Callable, args: tuple) -> float:
    """By the compiler's cycles."""
    return estimated(Costed(CHIP, "", compiled_text(step, args, CHIP)))[0]


class Taken(NamedTuple):
    """What a policy takes."""

    temp: float  # MiB of temporaries
    ms: float
    room: int  # bytes of its peak


@functools.cache
def taken(name: str, policy: str) -> Taken | None:
    """Under a policy; None where it does not fit the chip."""
    step, args = MODELS[name].under(policy)
    try:
        report = jaxmem.estimate(step, *args, target=CHIP)
    except DoesNotFit:
        return None
    room = peak_with(report, float(round(report.temp_bytes / MIB)))
    return Taken(report.temp_bytes / MIB, milliseconds(step, args), room)


def of_plan(name: str, room: int | None) -> tuple:
    """(MiB, ms, compiles, seconds) of `schedule`, or what there is to say instead."""
    step, args = MODELS[name].under("plain")
    plan = planned(step, args, room, target=CHIP)
    if isinstance(plan, str):
        return plan, "", "", ""
    scheduled = jaxmem.schedule(step, plan=plan, donate_argnums=())
    report = plan.scheduled
    about = len(plan.tried), plan.planning_seconds
    return report.temp_bytes / MIB, milliseconds(scheduled, args), *about


def row(name: str, policy: str) -> tuple:
    """A policy, and ours in its bytes; without a budget beside the fastest policy."""
    if policy == WITHOUT:
        found = [taken(name, one) for one in POLICIES]
        theirs = min((one for one in found if one), key=lambda one: one.ms)
        room = None
    else:
        theirs = taken(name, policy)
        if theirs is None:
            return NO_FIT, *[""] * 6
        room = theirs.room
    size, ms, *about = of_plan(name, room)
    ratio = f"{ms / theirs.ms:.3f}" if ms else ""
    return (theirs.temp, theirs.ms, size, ms, ratio, *about)


def measures() -> dict[tuple[str, str], Callable[[], tuple]]:
    """The first cells of the rows -> what measures the rest."""
    return {
        (name, policy): functools.partial(row, name, policy)
        for name in CHOSEN
        for policy in (*POLICIES, WITHOUT)
    }


def main() -> None:
    publish_some("frontier_tpu", COLUMNS, measures(), sys.argv[1:])


if __name__ == "__main__":
    sys.path[:0] = compiler_folders()
    main()
