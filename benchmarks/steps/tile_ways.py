"""How `benchmarks.tiles` asks for less: a step's own form, a budget, or tiles alone."""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

import jaxmem
from benchmarks import collectives
from benchmarks._common import MIB, TOO_LARGE, size_and_ms
from benchmarks.blocks import matmul_flops
from benchmarks.steps.tiles import STEPS, Made
from jaxmem.ir import jaxprs
from jaxmem.memory import DoesNotFit, MemoryReport
from jaxmem.memory.buffers import KINDS, Collective
from jaxmem.scheduling import BudgetError, Plan, TiledRegion
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.tiling.loop import SCOPE
from jaxmem.scheduling.tiling.tiles import Tiles

TIMEOUT = 3000.0  # seconds for one compile
TERA = 1e12
# MiB of temporaries and of the peak, predicted ms, TF, tiles, compiles, s
Cells = tuple[Any, ...]


def measured(name: str, how: str, target: str) -> Cells:
    """The cells of a row of `benchmarks.tiles`."""
    number, _, unit = how.partition(" ")
    if unit == "MiB":
        return within(STEPS[name]("plain"), target, int(number))
    if unit in CONFIGS:
        tiles = Tiles(limit=0, n=int(number))
        made, choice = STEPS[name]("plain"), Choice(target, (*CONFIGS[unit], tiles))
        return compiled(*in_tiles(made, choice), made, target)
    code, way = WAYS[how]
    return way(STEPS[name](code), target)


def as_it_is(made: Made, target: str) -> Cells:
    return compiled(made.step, "", made, target)


def compiled(step: Callable, tiles: str, made: Made, target: str) -> Cells:
    start = time.perf_counter()
    flops = matmul_flops(step, *made.args) / TERA
    try:
        report = report_of(step, made, target)
    except DoesNotFit:
        return TOO_LARGE, "", "", flops, tiles, 1, time.perf_counter() - start
    return *taken(report), flops, tiles, 1, time.perf_counter() - start


def taken(report: MemoryReport) -> Cells:
    """MiB of temporaries and of the peak, and the predicted ms."""
    assert report.seconds is not None  # a chip whose rates are known
    return report.temp_bytes / MIB, *size_and_ms(report, "peak_bytes")


def report_of(step: Callable, made: Made, target: str) -> MemoryReport:
    how = {"target": target, "donate_argnums": made.donate, "timeout": TIMEOUT}
    return jaxmem.estimate(step, *made.args, **how)


def scheduled(made: Made, target: str) -> Cells:
    """Without a budget, and without a compile to compare with."""
    step = jaxmem.schedule(made.step, donate_argnums=made.donate)
    return compiled(step, "", made, target)


# -- tiles alone


# what a row's name says -> what else is asked for
CONFIGS = {"tiles": (), "tiles, recomputed": (Recompute(1e-3),)}


def in_tiles(made: Made, choice: Choice) -> tuple[Callable, str]:
    """The step with all in tiles that can be, without a search; and what is cut."""
    own = jaxmem.schedule(made.step, donate_argnums=made.donate)
    found = own.rewritten(choice, *made.args)
    tree = jax.tree.structure(jax.eval_shape(made.step, *made.args))

    def step(*args):
        leaves = jaxprs.evaluate(found.jaxpr, jax.tree.leaves(args))
        return jax.tree.unflatten(tree, leaves)

    return step, shown(found.description.tiles)


def shown(tiles: tuple[TiledRegion, ...]) -> str:
    """ "8 over batch, 4 over heads"."""
    return ", ".join(dict.fromkeys(f"{r.n} over {r.axis}" for r in tiles))


# -- budgets


def planned(made: Made, target: str, budget: int, tile: bool = True) -> Plan:
    how = {"target": target, "donate_argnums": made.donate, "progress": False}
    return jaxmem.schedule(made.step, budget, tile=tile, **how).plan(*made.args)


def least(made: Made, target: str, tile: bool = True) -> Plan:
    """The plan of the least peak."""
    try:
        return planned(made, target, 1, tile)
    except BudgetError as error:
        return planned(made, target, error.least, tile)


def leaving(made: Made, target: str, temp: float) -> int:
    """The budget that leaves so many MiB for temporaries, to the nearest one."""
    plain = report_of(jax.jit(made.step, donate_argnums=made.donate), made, target)
    return plain.peak_bytes - plain.temp_bytes + round((temp + 0.5) * MIB)


def within(made: Made, target: str, temp: int) -> Cells:
    try:
        plan = planned(made, target, leaving(made, target, temp))
    except BudgetError as error:
        print(error)
        return "out of reach", *[""] * 6
    return of_plan(made, plan)


def recomputed(name: str, target: str, temp: int) -> tuple:
    """(MiB of temporaries, ms, % of the forward pass, tiles, compiles, s)."""
    made = STEPS[name]("plain")
    plan = planned(made, target, leaving(made, target, temp))
    assert plan.scheduled is not None  # it was compiled for a target
    share = 300 * plan.recomputed_flops / matmul_flops(made.step, *made.args)
    tiles = shown(plan.tiles)
    temporaries, _, ms = taken(plan.scheduled)
    found = temporaries, ms, share, tiles
    return *found, len(plan.tried), plan.planning_seconds


def is_in_tiles(one: Collective) -> bool:
    """Whether it runs in the loop of a region."""
    return any(SCOPE in loop for loop in one.loops)


def sent(name: str, how: str, target: str) -> tuple:
    """MiB of the operands of each kind of collective, in all loops of tiles, of temp.

    Of a device in a step; each counts as often as it runs.
    """
    made = STEPS[name](WAYS[how][0])
    step = made.step
    if how == "least":
        step, _ = in_tiles(made, least(made, target).choice)
    elif how != "plain":
        step = jaxmem.schedule(step, donate_argnums=made.donate)
    found, temp = collectives.compiled(step, *made.args, donate=made.donate)
    sends = lambda one: one.times * one.bytes / MIB
    kinds = (sum(sends(c) for c in found if c.kind == kind) for kind in KINDS)
    return *kinds, sum(sends(c) for c in found if is_in_tiles(c)), temp / MIB


def of_plan(made: Made, plan: Plan) -> Cells:
    assert plan.scheduled is not None  # it was compiled for a target
    step = jaxmem.schedule(made.step, plan=plan, donate_argnums=made.donate)
    flops = matmul_flops(step, *made.args) / TERA
    return (
        *taken(plan.scheduled),
        flops,
        shown(plan.tiles),
        len(plan.tried),
        plan.planning_seconds,
    )


def at_least(made: Made, target: str, tile: bool = True) -> Cells:
    return of_plan(made, least(made, target, tile))


# what a row's name says -> how its step is written, and what measures it
WAYS: Mapping[str, tuple[str, Callable[[Made, str], Cells]]] = {
    "plain": ("plain", as_it_is),
    "remat": ("remat", as_it_is),
    "by hand": ("by hand", as_it_is),
    "schedule": ("plain", scheduled),
    "remat, schedule": ("remat", scheduled),
    "by hand, schedule": ("by hand", scheduled),
    "microbatch": ("microbatch", as_it_is),
    "microbatch, schedule": ("microbatch", scheduled),
    "whole": ("plain", functools.partial(at_least, tile=False)),
    "least": ("plain", at_least),
}
