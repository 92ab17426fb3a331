"""Operations outside of loops: in an order, with barriers that make XLA keep it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxmem import planning
from jaxmem.chips import is_gpu, rates_of
from jaxmem.cost.equations import product_seconds
from jaxmem.ir.fused import fused_only
from jaxmem.ir.graph import Aliases
from jaxmem.ir.shards import InputShardings, Shardings
from jaxmem.memory import format_bytes
from jaxmem.planning import peak
from jaxmem.planning.remat import least
from jaxmem.planning.remat.costs import Cost
from jaxmem.scheduling._choice import Index
from jaxmem.scheduling._pass import NAME_A_TARGET, Level
from jaxmem.scheduling.order.given import fences_of, in_given_order
from jaxmem.scheduling.order.reductions import Reductions
from jaxmem.scheduling.order.sequence import in_sequence
from jaxmem.scheduling.order.updates import in_order
from jaxmem.scheduling.predict.dilated import with_dilated_inputs
from jaxmem.scheduling.predict.operations import (
    Operations,
    as_compiled,
    compiled_peak,
    operations_of,
)
from jaxmem.scheduling.predict.tpu import is_tpu

PATIENCE = 40.0  # seconds
# Of the frontier's own effort. Ten times as much finds plans of GPT-2 that recompute at
# most 5 % less, and takes five times as long where there are two layers.
EFFORT = 0.1


@dataclass(frozen=True)
class OperationOrder:
    """The order of the operations outside of loops."""

    name: ClassVar[str] = "order"
    # whether it is one that `planning.order` finds; else that of the step, with each
    # large update right after its gradient
    planned: bool = False
    # numbers of operations, some of them more than once, as `operations_of` counts
    # them; empty for one of the orders above
    sequence: tuple[Index, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Ordered:
    jaxpr: Any  # closed
    # the equations that cost, and are done more than once
    recomputed: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()  # why it is not in order
    # how the arrays of these equations are sharded
    shardings: Shardings = field(default_factory=Shardings, repr=False)


def ordered(level: Level, config: OperationOrder) -> Ordered:
    closed, aliases = level.jaxpr, level.aliases
    if level.loop is None and config.sequence:
        return _repeated(level, config.sequence)
    if level.loop is None and config.planned:
        return Ordered(_in_planned_order(level))
    if level.compared:
        return Ordered(in_order(closed, aliases, level.shardings))
    jaxpr, notes = clearly_ordered(closed, aliases, level.shardings)
    return Ordered(jaxpr, notes=tuple(notes))


def _in_planned_order(level: Level):
    """The jaxpr in the order that `planning.order` finds, with barriers to keep it."""
    # What the step computes twice need not wait in memory between the two: a barrier
    # of the order keeps XLA from doing it once.
    ops = _operations_of(level, duplicates=True)
    order = planning.order(ops.graph, time_limit=PATIENCE).operations
    return in_given_order(ops, order, fences_of(ops.graph, order))


def _repeated(level: Level, sequence: Sequence[int]):
    ops = _operations_of(level)
    again = tuple(_recomputed(ops, sequence))
    return Ordered(in_sequence(ops, sequence), again, shardings=ops.shardings)


def _operations_of(level: Level, duplicates: bool | None = None) -> Operations:
    how = {"duplicates": duplicates, "shardings": level.shardings}
    tpu = is_tpu(level.target)
    make = lambda: operations_of(level.jaxpr, level.aliases, tpu=tpu, **how)
    # a search puts one list of equations in many sequences
    return level.known.get(("operations", duplicates), (level,), make)


def _recomputed(ops: Operations, sequence: Sequence[int]) -> Iterator[Any]:
    seen: set[int] = set()
    for i in sequence:
        if i in seen:
            eqns = (ops.closed.eqns[k] for k in ops.equations[i])
            yield from (e for e in eqns if fused_only(e) is None)
        seen.add(i)


def sequences(
    closed,
    aliases: Aliases,
    target: str,
    patience: float = PATIENCE,
    shardings: InputShardings | None = None,
) -> list[tuple[OperationOrder, int, float]]:
    """(order, peak in bytes, seconds of recomputation) that pay, from none to most."""
    # `patience`: seconds for each of two searches, which end sooner where all is found;
    # `shardings`: how the inputs are sharded over devices.
    # operations are numbered as the graph of this chip has them, here and in the pass
    ops = operations_of(closed, aliases, tpu=is_tpu(target), shardings=shardings)
    order = planning.order(ops.graph, time_limit=patience).operations
    how = {"cost": _seconds(ops, target), "effort": EFFORT, "time_limit": patience}
    found = planning.frontier(ops.graph, order=order, **how)
    rows = zip(found.sequences, found.peaks, found.costs, strict=True)
    # XLA has a kernel for a whole softmax on GPUs alone
    made = Reductions(ops).repeated if is_gpu(target) else tuple
    return [
        (OperationOrder(sequence=tuple(made(sequence.tolist()))), peak, price)
        for sequence, peak, price in reversed(list(rows))
    ]


def recomputed_peak(
    closed, aliases: Aliases, target: str, shardings: InputShardings | None = None
) -> int:
    """A peak that one of these sequences is known to have, without a search."""
    tpu = is_tpu(target)
    written = with_dilated_inputs(closed, tpu)
    ops = operations_of(written, aliases, tpu=tpu, shardings=shardings)
    return least.recomputed_peak(ops.graph, _seconds(ops, target))


def _seconds(ops: Operations, target: str) -> Cost:
    """Of an operation's products, or of what it moves if that takes longer."""
    rates, seconds = rates_of(target), {}
    for operation, at in zip(ops.graph.operations, ops.equations, strict=True):
        eqns = (ops.closed.eqns[i] for i in at)
        products = sum(product_seconds(eqn, rates, ops.shardings) for eqn in eqns)
        seconds[operation] = max(products, operation.moved / rates.bandwidth)
    return seconds.__getitem__


# Of the temporaries as the step is written. The graph's own are off by less than a half
# on all steps of `benchmarks.predict` for an H100 but AlexNet's with a single image.
ERROR = 0.5


def clearly_ordered(
    closed, aliases: Mapping[int, int], shardings: InputShardings | None = None
) -> tuple[Any, list[str]]:
    """(the jaxpr, in order where that gains clearly; what the plan says if not)."""
    # No compiler can be asked without a target, and barriers may cost: they keep XLA
    # from fusing. So the graph must show a larger gain than it may be off by.
    # The step may be compiled as it is written, where updates wait for the end of the
    # backward pass: that is what order saves. XLA often finds a better order by itself,
    # in which barriers must not be larger either.
    ordered = in_order(closed, aliases, shardings)
    if ordered is closed:
        return closed, []
    both = closed, ordered
    graphs = [operations_of(one, aliases, shardings=shardings) for one in both]
    before, after = (peak(one.graph) for one in graphs)
    xla, held = (compiled_peak(as_compiled(one)) for one in graphs)
    if before - after > ERROR * before and held <= xla:
        return ordered, []
    return closed, [_no_order(before, before - after, held - xla)]


def _no_order(before: int, gain: int, loss: int) -> str:
    saved = f"{format_bytes(max(gain, 0))} of {format_bytes(before)}"
    why = f"would save {saved} at most, and it may be off by more"
    if loss > 0:
        why = f"would take {format_bytes(loss)} more than XLA's own order"
    return (
        "unrolled layers are not reordered: by the step's graph that "
        f"{why}; {NAME_A_TARGET}"
    )
