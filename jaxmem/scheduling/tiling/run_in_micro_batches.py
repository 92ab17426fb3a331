"""The pass that runs a whole step on some examples at a time, up to the gradients."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from jaxmem.memory import format_bytes
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._pass import Level
from jaxmem.scheduling._rewritten import Rewritten
from jaxmem.scheduling._searched import Front, SearchBound, Searched, SearchedStep
from jaxmem.scheduling.plan.rows import Description
from jaxmem.scheduling.search.traced_step import OFF
from jaxmem.scheduling.tiling.batch import Batch
from jaxmem.scheduling.tiling.batch_loop import in_parts, sum_bytes
from jaxmem.scheduling.tiling.batch_row import row_of
from jaxmem.scheduling.tiling.micro_batch_front import (
    first_counts,
    in_fewest,
    in_least_seconds,
    in_micro_batches,
    why_not,
)
from jaxmem.scheduling.tiling.micro_batches import MicroBatches, batch_in, left_whole

_PARTS = 16  # micro-batches that are expected to do: see `Searched.expected`


class RunInMicroBatches(Searched[MicroBatches, Batch]):
    """What a step holds for all of its examples, for a part of them at a time."""

    # It comes first: the other passes then find the loop's body as they would find that
    # of a user who had written the loop.
    config = MicroBatches
    in_parts = True
    whole_step = True

    def analyse(self, level: Level, config: MicroBatches) -> Iterator[Batch]:
        found = batch_in(level, config)
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
        return left_whole(level, config)

    def candidates(self, step: SearchedStep, bound: SearchBound) -> Front:
        arguments = step.traced.argument_bytes()
        if math.isfinite(bound.seconds):
            # what XLA takes above a prediction where most is kept says little of less
            room = bound.limit - arguments
            fastest = step.front[0].seconds
            return in_least_seconds(step.traced, room, bound.seconds, fastest)
        above = bound.above(Choice(step.target), arguments)
        room = bound.limit / OFF - above
        return in_micro_batches(step.traced, room, below=bound.least - above)

    def alone(self, step: SearchedStep, bound: SearchBound) -> Front:
        above = bound.above(Choice(step.target), math.inf)
        return in_fewest(step.traced, bound.limit - above, bound.seconds)

    def expected(self, step: SearchedStep, enough: float) -> Iterator[tuple[int, str]]:
        for n in first_counts(step.traced, _PARTS):
            choice = Choice(step.target).having(MicroBatches(n))
            size = step.traced.predicted(choice)
            yield size, f"the step runs in {n} micro-batches"

    def unreached(self, step: SearchedStep, made: Rewritten) -> Sequence[str]:
        return why_not(step.traced)
