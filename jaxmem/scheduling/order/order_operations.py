"""The pass that puts operations in order; a step's sequences are remembered."""

from collections.abc import Iterator
from typing import Any

from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._pass import Level
from jaxmem.scheduling._searched import (
    Candidate,
    Front,
    SearchBound,
    Searched,
    SearchedStep,
)
from jaxmem.scheduling.order.ordered import (
    PATIENCE,
    OperationOrder,
    Ordered,
    ordered,
    recomputed_peak,
    sequences,
)
from jaxmem.scheduling.plan.rows import Description, recomputed
from jaxmem.scheduling.recompute.barriers import RecomputeBehindBarriers, barriers_of
from jaxmem.scheduling.recompute.recomputation import MORE
from jaxmem.scheduling.recompute.space import space_at_sight, space_of_step
from jaxmem.scheduling.search.traced_step import OFF, TracedStep

# Of a peak: an order that is predicted above it saves less than its barriers may cost.
# They end fusions, of which the prediction knows nothing.
_ALIKE = 0.98
_REMEMBERED = 8  # steps

# by fingerprint, how the step's inputs are sharded over devices, and choice
_SEQUENCES: dict[tuple[Any, ...], list[Candidate]] = {}


class OrderOperations(Searched[OperationOrder, Ordered]):
    """Operations are put in order; some of them are done more than once."""

    config = OperationOrder
    orders = True

    def analyse(self, level: Level, config: OperationOrder) -> Iterator[Ordered]:
        yield ordered(level, config)

    def apply(self, level: Level, rewrite: Ordered):
        return rewrite.jaxpr

    def describe(self, rewrite: Ordered, target: str) -> Description:
        once = [(eqn, 1) for eqn in rewrite.recomputed]
        rows = recomputed(once, target, rewrite.shardings)
        return Description(recomputed=rows, notes=rewrite.notes)

    def free(self, step: SearchedStep) -> Iterator[OperationOrder]:
        if space_of_step(step).is_unrolled:
            yield OperationOrder(planned=True)

    def is_vain(self, step: SearchedStep) -> bool:
        # Where it is far from the limit, what may be recomputed is looked for at once,
        # while the first choice is compiled. XLA:GPU merges products there, which it
        # cannot do across the barriers of an order.
        plain = Choice(step.target)
        there, peak = step.traced.sizes_of(step.traced.rewritten(plain).unordered)
        if there + peak <= OFF * step.limit:
            return False
        base = plain.having(*RecomputeBehindBarriers().free(step))  # probably the best
        least = _candidates(step, base)[0].bytes
        return there + least > OFF * step.limit and least > _ALIKE * peak

    def front(self, step: SearchedStep, base: Choice) -> Front:
        space = space_of_step(step)
        first = space.is_unrolled and not space.before_sequences
        return _candidates(step, base) if first else ()

    def candidates(self, step: SearchedStep, bound: SearchBound) -> Front:
        if not space_of_step(step).before_sequences:
            return ()
        base = *barriers_of(step), *step.base
        return _candidates(step, Choice(step.target).having(*base))

    def expected(self, step: SearchedStep, enough: float) -> Iterator[tuple[int, str]]:
        if space_at_sight(step.traced).is_unrolled:
            traced = step.traced
            jaxpr = traced.rewritten(Choice(step.target)).unordered
            about = traced.aliases(jaxpr), step.target, traced.shardings
            yield recomputed_peak(jaxpr, *about), MORE


def _candidates(step: SearchedStep, base: Choice) -> list[Candidate]:
    find = lambda: of_sequences(step.traced, base, step.left() / 2)
    return step.traced.known.get(("sequences", base), (), find)


def of_sequences(step: TracedStep, choice: Choice, left: float) -> list[Candidate]:
    """The candidates with all of a choice, found in the seconds that are left."""
    if left < PATIENCE:
        return _looked_for(step, choice, left)
    # time ends some of these searches: another budget gets the same sequences
    key = step.fingerprint, step.shardings, choice
    found = _SEQUENCES.get(key)
    if found is None:
        found = _SEQUENCES[key] = _looked_for(step, choice, PATIENCE)
        for old in list(_SEQUENCES)[:-_REMEMBERED]:
            _SEQUENCES.pop(old, None)
    return found


def _looked_for(step: TracedStep, choice: Choice, patience: float) -> list[Candidate]:
    # a sequence counts the operations of this jaxpr, and is of no use in another one
    jaxpr = step.rewritten(choice).unordered
    found = sequences(jaxpr, step.aliases(jaxpr), step.target, patience, step.shardings)
    return [
        Candidate(choice.having(order), peak, seconds) for order, peak, seconds in found
    ]
