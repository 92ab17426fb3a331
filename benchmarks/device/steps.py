"""Steps: milliseconds of whole steps, plain and ours, in turn in one process.

Loss gradients of `benchmarks.blocks` by every stock policy, substituted and scheduled,
under four budgets, where the plan's estimated seconds stand beside the measured ones;
micro-batches; offload; throughput at the largest batch of the whole chip.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax

import jaxmem
from benchmarks import batch, blocks
from benchmarks._common import MIB
from benchmarks.device import machine, on_device, true
from benchmarks.device.job import GIB, Job, NotHere, Rows
from benchmarks.device.timing import in_turn
from benchmarks.models.transformers import BertConfig
from jaxmem.scheduling import BudgetError

MODELS = ("BERT-Large, 8 x 512", *blocks.STACKS)
SHARES = (0.6, 0.4, 0.25, 0.15)  # of the plain step's temporaries
ROUNDS = 12
OURS = ("substitute", "schedule", "substitute, schedule")


def jobs() -> Iterator[Job]:
    for name in MODELS:
        how = {"seconds": 120, "value": 480 if name == MODELS[0] else 300}
        yield Job(f"steps: {name}, stock", partial(stock, name), **how)
        yield Job(f"steps: {name}, ours", partial(ours, name), **how)
        for share in SHARES:
            rows, value = partial(budget, name, share, False), 150
            what = f"steps: {name}, budget of {share:.0%}"
            yield Job(what, rows, seconds=150, value=value)
        rows = partial(budget, name, 0.15, True)
        yield Job(f"steps: {name}, offload", rows, seconds=150, value=160)
    yield Job("steps: micro-batches", micro_batches, seconds=120, value=260)
    for how in true.stored_batches():
        rows = partial(throughput, how)
        yield Job(f"steps: largest batch, {how}", rows, seconds=100, value=220)


def timed(sides: dict[str, Callable], small: bool, **more) -> Rows:
    """A row for each side, and what it takes beside the first one."""
    fit, refused = on_device.that_fit(sides)
    for side, reason in refused.items():
        yield {"side": side, "fits": False, "said": reason, **more}
    times = in_turn(fit, 2 if small else ROUNDS, warm=1)
    first = next(iter(times.values()))["ms"] if times else 0.0
    for side, found in times.items():
        yield {"side": side, **found, "of first": found["ms"] / first, **more}


def gradient(name: str, small: bool, policy=None, substituted: bool = False):
    of, model = blocks.made(name, policy, small=small)
    return of(jaxmem.substitute(model) if substituted else model)


def stock(name: str, small: bool) -> Rows:
    sides: dict[str, on_device.Step] = {}
    for policy, rule in blocks.POLICIES.items():
        sides[policy] = on_device.ready(*gradient(name, small, rule), 0, sides)
    yield from timed(sides, small)


def ours(name: str, small: bool) -> Rows:
    step, args = gradient(name, small)
    sides = {"plain": on_device.ready(step, args, 0)}
    for what in OURS:
        step, args = gradient(name, small, substituted="substitute" in what)
        if "schedule" in what:
            step = jaxmem.schedule(step, donate_argnums=())
        sides[what] = on_device.ready(step, args, 0, sides)
    yield from timed(sides, small)


# -- budgets


def budget(name: str, share: float, offload: bool, small: bool) -> Rows:
    """Plain and in a budget, and the seconds that the plan has estimated."""
    step, args = gradient(name, small)
    plain = on_device.ready(step, args, 0)
    temp = plain.compiled.memory_analysis().temp_size_in_bytes
    room = on_device.compiled_bytes(plain.compiled) - round((1 - share) * temp)
    how = {"donate_argnums": (), "offload": offload}
    scheduled = jaxmem.schedule(step, room, **how)
    try:
        plan = scheduled.plan(*args)
    except BudgetError as error:
        raise NotHere(f"out of reach: {error}".splitlines()[0]) from error
    sides = {"plain": plain}
    sides["scheduled"] = on_device.ready(scheduled, args, 0, sides)
    rows = {row["side"]: row for row in timed(sides, small)}
    plain_ms, ms = (row.get("ms") for row in (rows["plain"], rows["scheduled"]))
    more = None if None in (plain_ms, ms) else ms - plain_ms
    yield rows["plain"]
    yield rows["scheduled"] | {"budget MiB": room / MIB, **said_and_seen(plan, more)}


def said_and_seen(plan: Any, more: float | None) -> dict[str, Any]:
    """Milliseconds beyond the plain step's, as estimated and as measured.

    "transfer ms" is what the host's link takes to the host and back: what of it is not
    in "more ms" has been hidden behind arithmetic.
    """
    seconds = [t.seconds for t in plan.tried if t.choice == plan.choice]
    found = {"estimated more ms": 1e3 * seconds[0]} if seconds else {}
    rates = machine.rates()
    if plan.offloaded_bytes and rates is not None:
        found["offloaded MiB"] = plan.offloaded_bytes / MIB
        found["transfer ms"] = 2e3 * plan.offloaded_bytes / rates.host
    return {"more ms": more, **found}


# -- micro-batches and throughput


def micro_batches(small: bool) -> Rows:
    """AdamA beside accumulation; the states of all lie in memory together."""
    sides = {
        variant: on_device.ready(*true.accumulated(variant, small))
        for variant in true.VARIANTS
    }
    yield from timed(sides, small)


def throughput(how: str, small: bool) -> Rows:
    """At the stored batch for 16 GiB, scaled to the room that this chip has."""
    room = on_device.stats().get("bytes_limit")
    if room is None and not small:
        raise NotHere("this device has no memory_stats")
    _, state = batch.step_of(how, true.SMALL if small else BertConfig())
    held = on_device.held_bytes(jax.eval_shape(lambda x: x, state))
    largest = true.stored_batches()[how]
    scaled = largest * ((room or 16 * GIB) - held) / (16 * GIB - held)
    yield from true.fits(how, int(0.95 * scaled), small)
