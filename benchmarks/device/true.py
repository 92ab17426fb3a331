"""True: what steps really take on a device, beside what was said before.

Each step has a process of its own, since `memory_stats` has one peak for all that a
process did. Its peak has what the framework holds besides, so a small difference
upwards is none of the estimate.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax

from benchmarks import accumulation, batch, blocks
from benchmarks._common import MIB, RESULTS
from benchmarks.device import on_device
from benchmarks.device.job import GIB, Job, NotHere, Rows
from benchmarks.models.transformers import Bert, BertConfig
from jaxmem.scheduling import BudgetError

SMALL = blocks.SMALL_BERT
CALLS = 3
WHOLE = ("plain", "substituted", "schedule", "substituted, schedule")
BUDGETS = (0.75, 0.6, 0.45)  # of the plain step's peak
MICRO_BATCHES = 4
VARIANTS = ("accumulation by hand, Adam", "microbatch, Adam", "microbatch, AdamA")


def jobs() -> Iterator[Job]:
    for name, make in steps().items():
        value = 400 if name in WHOLE else 300
        yield Job(f"true: {name}", partial(peak, make), seconds=90, value=value)
    for how, largest in stored_batches().items():
        for what, more in (("fits", 0), ("does not fit", 1)):
            size = largest + more * max(1, largest // 16)
            rows, name = partial(fits, how, size), f"true: 16 GiB {what}, {how}"
            yield Job(name, rows, seconds=90, value=280, memory=16 * GIB)


# -- peaks: functions of `small` to (step, arguments, how many are carried)

Made = tuple[Callable, tuple, int]


def steps() -> dict[str, Callable[[bool], Made]]:
    """Twelve and more."""
    found: dict[str, Callable[[bool], Made]] = {}
    for how in WHOLE:
        found[how] = partial(trained, how)
    for share in BUDGETS:
        found[f"budget of {share:.0%}"] = partial(in_budget, share, False)
    found["offload, budget of 45%"] = partial(in_budget, 0.45, True)
    for variant in VARIANTS:
        found[variant] = partial(accumulated, variant)
    for name in blocks.STACKS:
        found[f"gradient, {name}"] = partial(gradient, name)
    return found


def trained(how: str, small: bool, **options) -> Made:
    """Adam on BERT-Large, 8 x 512."""
    step, state = batch.step_of(how, SMALL if small else BertConfig(), **options)
    return step, batch.arguments(state, 2 if small else 8), 1


def in_budget(share: float, offload: bool, small: bool) -> Made:
    step, args, _ = trained("plain", small)
    room = round(share * on_device.compiled_bytes(on_device.compiled(step, args)))
    return trained("schedule", small, budget=room, offload=offload)


def accumulated(variant: str, small: bool) -> Made:
    made = Bert(SMALL) if small else None
    return *accumulation.step_of(variant, MICRO_BATCHES, made), 2


def gradient(name: str, small: bool) -> Made:
    of, model = blocks.made(name, small=small)
    return *of(model), 0


def peak(make: Callable[[bool], Made], small: bool) -> Rows:
    """Bytes of a step's calls, by the device, the compiler and `estimate`."""
    try:
        step, args, carried = make(small)
        ready = on_device.ready(step, args, carried)
    except BudgetError as error:
        raise NotHere(f"out of reach: {error}".splitlines()[0]) from error
    said = on_device.compiled_bytes(ready.compiled) / MIB
    before = on_device.stats()
    for _ in range(CALLS):
        ready()
    row: dict[str, Any] = {"compiled MiB": said, **on_device.estimated(step, args)}
    yield row | {
        "arguments MiB": on_device.held_bytes(args) / MIB,
        **_seen(before, said),
    }


def _seen(before: dict[str, int], said: float) -> dict[str, Any]:
    after = on_device.stats()
    if not after:
        return {"measured": "this device has no memory_stats"}
    measured = after["peak_bytes_in_use"] / MIB
    return {
        "measured MiB": measured,
        "off %": 100 * (said / measured - 1),
        "peak before MiB": before["peak_bytes_in_use"] / MIB,
    }


# -- batches


def stored_batches() -> dict[str, int]:
    """The largest batches in 16 GiB that `python -m benchmarks.batch` has found.

    The kernels' rows are left out, which compile for some chips alone.
    """
    path = sorted(RESULTS.glob("batch-jax*.csv"))[-1]
    rows = batch.rows_of(path)
    return {how: int(n) for how, n in rows.items() if "kernels" not in how}


def fits(how: str, size: int, small: bool) -> Rows:
    """Whether so many sequences run, and how many a second."""
    step, state = batch.step_of(how, SMALL if small else BertConfig())
    size = 2 if small else size
    try:
        ready = on_device.ready(step, batch.arguments(state, size), 1)
        times = sorted(ready() for _ in range(2 if small else 8))
    except jax.errors.JaxRuntimeError as error:
        if not on_device.out_of_memory(error):
            raise
        yield {"step": how, "batch": size, "fits": False, "said": str(error)[:200]}
        return
    middle = times[len(times) // 2]
    found = {"fits": True, "ms": middle, "sequences a second": 1e3 * size / middle}
    yield {"step": how, "batch": size, **found}
