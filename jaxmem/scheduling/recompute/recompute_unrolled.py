"""The pass that recomputes what unrolled layers keep, and its front."""

from collections.abc import Iterator

from jaxmem.ir import jaxprs
from jaxmem.ir.dequantized import dequantizing
from jaxmem.ir.graph import JaxprGraph
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._pass import Level
from jaxmem.scheduling._searched import (
    Front,
    SearchBound,
    Searched,
    SearchedStep,
    having,
)
from jaxmem.scheduling.plan.rows import (
    Description,
    RecomputedResidual,
    recomputed,
    residual,
)
from jaxmem.scheduling.recompute.barriers import barriers_of
from jaxmem.scheduling.recompute.front import pareto_front
from jaxmem.scheduling.recompute.pairs import Cut, Pair
from jaxmem.scheduling.recompute.space import space_of_step
from jaxmem.scheduling.recompute.unrolled import (
    Recomputed,
    Unrolled,
    has_both_passes,
    not_kept,
    weights_made_by,
)
from jaxmem.scheduling.recompute.unrolled_cut import (
    unrolled,
    unrolled_cut,
    with_layer_inputs,
)


class RecomputeUnrolled(Searched[Unrolled, tuple[Pair, Cut]]):
    """In unrolled layers, values of the forward pass are recomputed."""

    config = Unrolled

    def analyse(self, level: Level, config: Unrolled) -> Iterator[tuple[Pair, Cut]]:
        if not has_both_passes(level):
            return
        if config.rate is None:
            yield from _of_few_bits(level)
            return
        pair = unrolled(level.jaxpr, level.shardings)
        if pair is None:
            return
        every = config.layer_inputs
        pair = with_layer_inputs(pair, every) if every else pair
        found = unrolled_cut(pair, config.rate, level.target, config.reductions)
        if found.cost < pair.bytes:
            yield pair, found

    def apply(self, level: Level, rewrite: tuple[Pair, Cut]):
        run = lambda args: Recomputed.of(*rewrite, args).all_outputs()
        return jaxprs.retrace(level.jaxpr, run)

    def free(self, step: SearchedStep) -> Iterator[Unrolled]:
        # what reads less of what it makes anyway; XLA:GPU makes more of that
        if space_of_step(step).before_sequences:
            yield _front_of(step)[0].choice.get(Unrolled)

    def is_vain(self, step: SearchedStep) -> bool:
        return True  # where bytes are asked for it is a candidate

    def front(self, step: SearchedStep, base: Choice) -> Front:
        unrolled = space_of_step(step).is_unrolled
        return having(base.configs, _front_of(step)) if unrolled else ()

    def candidates(self, step: SearchedStep, bound: SearchBound) -> Front:
        space = space_of_step(step)
        # where a search starts from sequences, these come behind them
        if not space.is_unrolled or space.before_sequences:
            return ()
        return having(barriers_of(step), _front_of(step))

    def describe(self, rewrite: tuple[Pair, Cut], target: str) -> Description:
        pair, found = rewrite
        eqns = [pair.body.eqns[i] for i in found.recomputed]
        paid = [(e, 1) for e in eqns if pair.is_paid(e)]
        return Description(
            residuals=tuple(_rows_of_few_bits(pair, found)),
            recomputed=recomputed(paid, target, pair.inside()),
        )


def _front_of(step: SearchedStep) -> Front:
    key = "front of unrolled layers", step.named, step.offload
    find = lambda: pareto_front(space_of_step(step))
    return step.traced.known.get(key, (), find)


def _of_few_bits(level: Level) -> Iterator[tuple[Pair, Cut]]:
    """What is kept of arguments of few bits is recomputed, and nothing else."""
    free = dequantizing(JaxprGraph(level.jaxpr))
    pair = unrolled(level.jaxpr, level.shardings) if free else None
    if pair is None:
        return
    pair, found = weights_made_by(free, pair)
    gone = [pair.inside().bytes_of(v) for v in not_kept(pair, found)]
    # the compiler's order may hold one of them more in the backward pass
    if sum(gone) > (0 if level.compared else max(gone, default=0)):
        yield pair, found


def _rows_of_few_bits(pair: Pair, found: Cut) -> Iterator[RecomputedResidual]:
    free = dequantizing(pair.body)
    for v in not_kept(pair, found):
        i = pair.body.maker[v]
        if i in free:
            words = "from arguments of few bits"
            yield residual(v.aval, pair.body.eqns[i], words, 1, pair.shards(v))
