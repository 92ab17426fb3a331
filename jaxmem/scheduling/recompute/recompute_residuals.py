"""The pass that recomputes residuals of scans, and the front a search starts from."""

from collections.abc import Iterator

from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._pass import Level
from jaxmem.scheduling._searched import Front, SearchedStep, having
from jaxmem.scheduling.recompute.front import front_with_reductions, pareto_front
from jaxmem.scheduling.recompute.pair_rewrite import PairRewrite
from jaxmem.scheduling.recompute.recomputation import MORE, Recomputation
from jaxmem.scheduling.recompute.residuals import (
    Recompute,
    clear_gain,
    rewrites_of,
    unclear_gains,
    with_recomputation,
)
from jaxmem.scheduling.recompute.space import space_at_sight, space_of_step


class RecomputeResiduals(Recomputation[Recompute, PairRewrite]):
    """In all layers of a scan, residuals that are worth it are recomputed."""

    config = Recompute

    def analyse(self, level: Level, config: Recompute) -> Iterator[PairRewrite]:
        rewrites = rewrites_of(level, config)
        return (r for r in rewrites if level.compared or clear_gain(level, r))

    def apply(self, level: Level, rewrite: PairRewrite):
        return with_recomputation(level.jaxpr, rewrite)

    def left(self, level: Level, config: Recompute) -> Iterator[str]:
        if not level.compared:
            yield from unclear_gains(level, rewrites_of(level, config))

    def front(self, step: SearchedStep, base: Choice) -> Front:
        space = space_of_step(step)
        return () if space.is_unrolled else having(base.configs, pareto_front(space))

    def other_form(self, step: SearchedStep) -> Front:
        return front_with_reductions(space_of_step(step))

    def start(self, step: SearchedStep) -> Front:
        space = space_at_sight(step.traced)
        return () if space.is_unrolled else pareto_front(space)

    def expected(self, step: SearchedStep, enough: float) -> Iterator[tuple[int, str]]:
        if not space_at_sight(step.traced).is_unrolled:
            yield step.traced.predicted(step.front[-1].choice), MORE
