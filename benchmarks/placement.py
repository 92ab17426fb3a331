"""Which arrays wait in the host's memory: at random, by bytes, and as `schedule` says.

    python -m benchmarks.placement              # every row
    python -m benchmarks.placement BERT random  # rows that have both; others stay

EGRL (Khadka et al. 2020, https://arxiv.org/abs/2007.07298) chooses a tier of memory for
each array by search, and compares it with rules. Here are two tiers, an H100's memory
and its host's, and the arrays are those that a scan's layers keep for the backward
pass. A rule gives them an order; they are sent in it until the compiled step is within
so many MiB of temporaries. "residuals" says whose: those that JAX keeps, or those that
`schedule` keeps without a budget, which are fewer as it recomputes what takes less
time than to move it. All rules send arrays as the library does, beside the layers'
computation. "in the order of `schedule`" sends first what has the longest to overlap
with; `schedule` itself (`offload=True, tile=False`) chooses what to keep as well.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxmem
from benchmarks._common import MIB, peak_with, publish_some, size_and_ms
from benchmarks.blocks import TARGET, made
from jaxmem.ir.jaxprs import evaluate
from jaxmem.ir.scans import kept_size
from jaxmem.scheduling import BudgetError
from jaxmem.scheduling.recompute.pairs import Cut, Pair, pairs
from jaxmem.scheduling.recompute.residuals import rewrite_of, with_recomputation
from jaxmem.scheduling.recompute.to_host import Offloaded, in_order

ROOMS = {  # MiB of temporaries
    "BERT-Large, 8 x 512": (1600, 904),
    "Llama-1B blocks, 2 x 2048": (5000, 3685),
}
SEEDS = 3
OURS = "schedule"
COLUMNS = (
    *("model", "at most MiB", "residuals", "placement"),
    *("temp MiB", "predicted ms", "on the host MiB", "sent", "of", "compiles"),
)


class Kept(NamedTuple):
    """A step whose layers keep arrays, nothing of which is sent.

    Attributes:
      closed: the step's jaxpr.
      pair: its scans, forward and backward.
      args: of the step.
    """

    closed: Any
    pair: Pair
    args: tuple

    @property
    def arrays(self) -> list[Any]:
        """Variables of the forward body that it stacks for the backward one."""
        return list(dict.fromkeys(self.pair.slots.values()))

    def sending(self, sent: Sequence[Any]) -> Any:
        """The jaxpr of the step which sends these."""
        if not sent:
            return self.closed
        # those that are made late go beside the next layer, as `schedule` has it
        away = Offloaded(tuple(sent), in_order(self.pair, sent, TARGET).later)
        every = Cut(tuple(self.arrays), (), 0.0, 0.0, ())
        plan = rewrite_of(self.pair, every, self.pair.length, away)
        return with_recomputation(self.closed, plan)

    def report(self, sent: Sequence[Any]) -> jaxmem.memory.MemoryReport:
        """Of the compiled step which sends these."""
        closed = self.sending(sent)
        step = lambda *args: evaluate(closed, jax.tree.leaves(args))
        return jaxmem.estimate(step, *self.args, target=TARGET)


def plain(name: str) -> tuple[Callable, tuple]:
    """The loss gradient, and its arguments."""
    gradient, model = made(name)
    return gradient(model)


@functools.cache
def by_jax(name: str) -> Kept:
    step, args = plain(name)
    closed = jax.make_jaxpr(step)(*args)
    (pair,) = pairs(closed)
    return Kept(closed, pair, args)


@functools.cache
def by_schedule(name: str) -> Kept:
    step, args = plain(name)
    scheduled = jaxmem.schedule(step, target=TARGET, donate_argnums=())
    (call,) = jax.make_jaxpr(scheduled)(*args).eqns
    closed = call.params["jaxpr"]
    (pair,) = pairs(closed)
    return Kept(closed, pair, args)


def random(kept: Kept, seed: int) -> list[Any]:
    order = np.random.default_rng(seed).permutation(len(kept.arrays))
    return [kept.arrays[i] for i in order]


def by_bytes(kept: Kept) -> list[Any]:
    return sorted(kept.arrays, key=kept_size, reverse=True)


def by_overlap(kept: Kept) -> list[Any]:
    return list(in_order(kept.pair, kept.arrays, TARGET).variables)


ORDERS: dict[str, Callable[[Kept], list[Any]]] = {
    **{
        f"random, seed {seed}": functools.partial(random, seed=seed)
        for seed in range(SEEDS)
    },
    "largest first": by_bytes,
    "in the order of `schedule`": by_overlap,
}
RESIDUALS = {"of JAX": by_jax, "of `schedule`": by_schedule}


def enough(order: Sequence[Any], layers: int, excess: float) -> int:
    """How many of the first arrays have so many bytes in all layers; one at least."""
    sums = itertools.accumulate(layers * kept_size(v) for v in order)
    return next((k for k, size in enumerate(sums, 1) if size >= excess), len(order))


@functools.cache
def all_here(kept: Callable[[str], Kept], name: str) -> float:
    """MiB of temporaries where nothing is sent."""
    return size_and_ms(kept(name).report(()))[0]


def placed(name: str, room: int, residuals: str, rule: str) -> tuple:
    """The step which sends the first of an order, as many as it takes."""
    kept = RESIDUALS[residuals](name)
    order, layers = ORDERS[rule](kept), kept.pair.length
    excess, count, compiles = all_here(RESIDUALS[residuals], name) - room, 0, 0
    while excess > 0 and count < len(order):
        count += enough(order[count:], layers, excess * MIB)
        temp, ms = size_and_ms(kept.report(order[:count]))
        excess, compiles = temp - room, compiles + 1
    if excess > 0:
        return f"out of reach: {temp:.0f}", "", "", count, len(order), compiles
    away = layers * sum(map(kept_size, order[:count])) / MIB
    return temp, ms, away, count, len(order), compiles


def scheduled(name: str, room: int, offload: bool) -> tuple:
    """What `schedule` finds in as many bytes."""
    step, args = plain(name)
    budget = peak_with(jaxmem.estimate(step, *args, target=TARGET), room)
    how = {"target": TARGET, "donate_argnums": (), "tile": False, "offload": offload}
    try:
        plan = jaxmem.schedule(step, budget, **how).plan(*args)
    except BudgetError as error:
        print(error)
        return "out of reach", "", "", "", "", ""
    away = plan.offloaded_bytes / MIB
    return *size_and_ms(plan.scheduled), away, "", "", len(plan.tried)


def cases() -> dict[tuple[str, ...], Callable[[], Sequence]]:
    """The first cells of the rows -> what measures the rest."""
    found: dict[tuple[str, ...], Callable[[], Sequence]] = {}
    for name, rooms in ROOMS.items():
        for room in rooms:
            for how, offload in ((OURS, True), ("schedule, recomputing alone", False)):
                key = name, str(room), "chosen", how
                found[key] = functools.partial(scheduled, name, room, offload)
            for whose, rule in itertools.product(RESIDUALS, ORDERS):
                key = name, str(room), whose, rule
                found[key] = functools.partial(placed, name, room, whose, rule)
    return found


if __name__ == "__main__":
    publish_some("placement", COLUMNS, cases(), sys.argv[1:])
