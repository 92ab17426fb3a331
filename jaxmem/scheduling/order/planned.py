"""Operations outside of loops in an order of our own, or some of them twice."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxmem import planning
from jaxmem.ir.costs import MACHINES, fused_only
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling.order.given import fences_of, in_given_order
from jaxmem.scheduling.order.sequence import in_sequence
from jaxmem.scheduling.predict.operations import Operations, operations_of
from jaxmem.scheduling.predict.tpu import is_tpu
from jaxmem.scheduling.search.front import Rung

PATIENCE = 40.0  # seconds
# Of the frontier's own effort. Ten times as much finds plans of GPT-2 that recompute at
# most 5 % less, and takes five times as long where there are two layers.
EFFORT = 0.1

Aliases = Mapping[int, int]


def reordered(closed, aliases: Aliases, machine: str):
    """The jaxpr in the order that `planning.order` finds, with barriers to keep it."""
    ops = operations_of(closed, aliases, tpu=is_tpu(machine))
    order = planning.order(ops.graph, time_limit=PATIENCE).operations
    return in_given_order(ops, order, fences_of(ops.graph, order))


def repeat(
    closed, aliases: Aliases, sequence: Sequence[int], machine: str
) -> tuple[Any, list[Any]]:
    """The jaxpr in this sequence; what of it is done again and costs something."""
    ops = operations_of(closed, aliases, tpu=is_tpu(machine))
    return in_sequence(ops, sequence), list(_again(ops, sequence))


def _again(ops: Operations, sequence: Sequence[int]) -> Iterator[Any]:
    seen: set[int] = set()
    for i in sequence:
        if i in seen:
            eqns = (ops.closed.eqns[k] for k in ops.equations[i])
            yield from (e for e in eqns if fused_only(e) is None)
        seen.add(i)


def sequences(
    closed, aliases: Aliases, machine: str, patience: float = PATIENCE
) -> list[Rung]:
    """The choices of operations to do twice that pay, from none to most.

    `patience`: seconds for each of two searches, which end sooner where all is found.
    """
    # operations are numbered as the graph of this chip has them, here and in `repeat`
    ops = operations_of(closed, aliases, tpu=is_tpu(machine))
    chip = MACHINES[machine]
    order = planning.order(ops.graph, time_limit=patience).operations
    cost = planning.seconds(chip.narrow, chip.bandwidth)
    found = planning.frontier(
        ops.graph, order=order, cost=cost, effort=EFFORT, time_limit=patience
    )
    rungs = zip(found.peaks, found.costs, found.sequences, strict=True)
    return [
        Rung(Choice(machine, sequence=tuple(sequence.tolist())), peak, price)
        for peak, price, sequence in reversed(list(rungs))
    ]
