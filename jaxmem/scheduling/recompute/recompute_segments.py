"""The pass that runs segments of layers forward a second time."""

from collections.abc import Iterator

from jaxmem.scheduling._pass import Level
from jaxmem.scheduling._searched import Front, SearchBound, Searched, SearchedStep
from jaxmem.scheduling.recompute.front import space_of_step
from jaxmem.scheduling.recompute.front_segments import in_segments
from jaxmem.scheduling.recompute.minimum_cut import price_at
from jaxmem.scheduling.recompute.recomputation import Recomputation
from jaxmem.scheduling.recompute.segments import Segments, segmented
from jaxmem.scheduling.recompute.segments_rewrite import InSegments, with_segments


class RecomputeSegments(
    Recomputation[InSegments, Segments], Searched[InSegments, Segments]
):
    """Layers are run forward a second time, a segment of them at a time."""

    config = InSegments

    def analyse(self, level: Level, config: InSegments) -> Iterator[Segments]:
        if not config.sizes:
            return iter(())
        price = price_at(config.rate, level.target)
        return segmented(level.jaxpr, price, config.sizes, level.spreads)

    def apply(self, level: Level, rewrite: Segments):
        return with_segments(level.jaxpr, rewrite)

    def candidates(self, step: SearchedStep, bound: SearchBound) -> Front:
        find = lambda: in_segments(space_of_step(step), step.front)
        found = step.traced.known.get("in segments", tuple(step.front), find)
        if any(map(bound.allows, found)):  # tiles take no less of either
            found = step.refined(found)
        return list(filter(bound.allows, found))
