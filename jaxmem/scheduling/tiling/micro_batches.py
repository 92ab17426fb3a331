"""The pass that runs a whole step on some examples at a time, up to the gradients."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxmem.ir import jaxprs
from jaxmem.ir.graph import by_shape
from jaxmem.ir.shard_labels import labelled_spreads
from jaxmem.ir.shards import Spreads
from jaxmem.memory import format_bytes
from jaxmem.scheduling._choice import Count
from jaxmem.scheduling._pass import Level, Pass
from jaxmem.scheduling.plan.rows import Description
from jaxmem.scheduling.tiling.batch import Batch, find
from jaxmem.scheduling.tiling.batch_loop import in_parts, is_batch_loop, sum_bytes
from jaxmem.scheduling.tiling.batch_row import row_of


@dataclass(frozen=True)
class MicroBatches:
    """In how many parts the examples of a step run."""

    name: ClassVar[str] = "micro_batches"
    n: Count = 1


class RunInMicroBatches(Pass[MicroBatches, Batch]):
    """What a step holds for all of its examples, for a part of them at a time."""

    # It comes first: the other passes then find the loop's body as they would find that
    # of a user who had written the loop.
    config = MicroBatches
    in_parts = True

    def analyse(self, level: Level, config: MicroBatches) -> Iterator[Batch]:
        found = _found(level, config)
        if isinstance(found, Batch):
            yield found

    def apply(self, level: Level, rewrite: Batch) -> Any:
        return in_parts(level.jaxpr, rewrite)

    def describe(self, rewrite: Batch, target: str) -> Description:
        note = (
            f"the step runs on its examples in {rewrite.n} micro-batches; what they "
            f"add up takes {format_bytes(sum_bytes(rewrite))}"
        )
        return Description(notes=(note,), tiles=(row_of(rewrite, target),))

    def left(self, level: Level, config: MicroBatches) -> Iterator[str]:
        found = _found(level, config)
        if isinstance(found, str):
            yield f"the step does not run in {config.n} micro-batches: {found}"


def _found(level: Level, config: MicroBatches) -> Batch | str | None:
    """The region; why there is none; None where it was not asked for."""
    jaxpr = jaxprs.split(level.jaxpr)[0]
    if config.n == 1 or level.loop is not None or any(map(is_batch_loop, jaxpr.eqns)):
        return None
    return find(level.jaxpr, config.n, _given(level), _spreads(level))


def lengths(level: Level) -> set[int]:
    """How many examples there may be, in each shard, by the step's arguments."""
    given = [jaxprs.split(level.jaxpr)[0].invars[i] for i in _given(level)]
    spreads = _spreads(level)
    axes = ((v, axis) for v in given if v.aval.ndim for axis in {0, v.aval.ndim - 1})
    sizes = (v.aval.shape[axis] // spreads.count(v, axis) for v, axis in axes)
    return {size for size in sizes if size > 1}


def _spreads(level: Level) -> Spreads:
    run = lambda: labelled_spreads(level.jaxpr, level.spreads)
    return level.known.get("spreads", (level,), run)


def _given(level: Level) -> list[int]:
    # What comes out as it went in is state: parameters, moments.
    every = range(len(jaxprs.split(level.jaxpr)[0].invars))
    state = {*by_shape(level.jaxpr, every).values(), *level.aliases.values()}
    return [i for i in every if i not in state]
