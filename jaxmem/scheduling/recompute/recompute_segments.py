"""The pass that runs segments of layers forward a second time, and its candidates.

Each candidate of the front can go in segments of any size, with segments inside of them
or without. They have the same curve: bytes over seconds.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmem.chips import Rates, rates_of
from jaxmem.cost.equations import recompute_seconds
from jaxmem.ir.shards import Shardings
from jaxmem.scheduling._pass import Level
from jaxmem.scheduling._searched import (
    LEAST,
    Candidate,
    Front,
    SearchBound,
    SearchedStep,
    descending,
)
from jaxmem.scheduling.recompute.front import all_kept
from jaxmem.scheduling.recompute.minimum_cut import price_at
from jaxmem.scheduling.recompute.pairs import Cut, Pair, cut
from jaxmem.scheduling.recompute.recomputation import MORE, Recomputation
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.recompute.segments import Segments, of_every_size, segmented
from jaxmem.scheduling.recompute.segments_rewrite import InSegments, with_segments
from jaxmem.scheduling.recompute.space import SearchSpace, space_at_sight, space_of_step


class RecomputeSegments(Recomputation[InSegments, Segments]):
    """Layers are run forward a second time, a segment of them at a time."""

    config = InSegments

    def analyse(self, level: Level, config: InSegments) -> Iterator[Segments]:
        if not config.sizes:
            return iter(())
        price = price_at(config.rate, level.target)
        return segmented(level.jaxpr, price, config.sizes, level.shardings)

    def apply(self, level: Level, rewrite: Segments):
        return with_segments(level.jaxpr, rewrite)

    def candidates(self, step: SearchedStep, bound: SearchBound) -> Front:
        find = lambda: in_segments(space_of_step(step), step.front)
        found = step.traced.known.get("in segments", tuple(step.front), find)
        if any(map(bound.allows, found)):  # tiles take no less of either
            found = step.refined(found)
        return list(filter(bound.allows, found))

    def expected(self, step: SearchedStep, enough: float) -> Iterator[tuple[int, str]]:
        for one in in_segments(space_at_sight(step.traced), step.front)[-1:]:
            yield step.traced.predicted(one.choice), MORE


def in_segments(space: SearchSpace, flat: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that run segments of layers a second time, where that is worth it."""
    # `flat`: those of `pareto_front`, which take fewer seconds for bytes they reach.
    # Nothing waits in the host's memory.
    if space.named or space.is_unrolled:
        return []
    flat = [
        candidate
        for candidate in flat
        if candidate.choice.get(Recompute).offload is None
    ]
    found = [r for r in _of_any_size(space, flat) if _is_below(r, flat)]
    found.sort(key=lambda candidate: candidate.seconds)
    return descending(found, LEAST * flat[0].bytes)


def _of_any_size(
    space: SearchSpace, candidates: Sequence[Candidate]
) -> Iterator[Candidate]:
    """What each candidate is in segments, of all sizes at which something is saved."""
    rates, whole = rates_of(space.target), all_kept(space)
    for candidate in candidates:
        if candidate.choice.get(Recompute).once:
            continue
        rate = candidate.choice.get(Recompute).rate
        price = price_at(rate, space.target)
        cuts = [(pair, cut(pair, price, loop_carried=False)) for pair in space.scans]
        flat = [_in_no_segments(*found, rates) for found in cuts]
        in_sizes = [dict(_by_size(*found, rates)) for found in cuts]
        for sizes in sorted({sizes for of_pair in in_sizes for sizes in of_pair}):
            taken = [a.get(sizes, b) for a, b in zip(in_sizes, flat, strict=True)]
            kept = sum(figures.bytes for figures in taken)
            time = sum(figures.seconds for figures in taken)
            moved = sum(figures.moved for figures in taken)
            choice = candidate.choice.having(InSegments(rate, sizes))
            longer = space.longer(time, whole - moved)
            yield Candidate(choice, kept, longer)


@dataclass(frozen=True)
class _Figures:
    """Of a pair of scans.

    Attributes:
      bytes: kept at one time.
      moved: written and read: what the layers of a segment keep, too, when it is run a
        second time.
      seconds: of recomputation.
    """

    bytes: int
    moved: int
    seconds: float


def _in_no_segments(pair: Pair, found: Cut, rates: Rates) -> _Figures:
    eqns = ((pair.body.eqns[i], pair.length) for i in found.recomputed)
    kept = round(pair.length * pair.kept_on_device(found.variables))
    return _Figures(kept, kept, _seconds(eqns, rates, pair.inside()))


def _by_size(pair: Pair, found: Cut, rates: Rates) -> Iterator[tuple]:
    """(sizes, figures) of a pair's segments, which differ in how often layers run."""
    plans = list(of_every_size(pair, found))
    if not plans:
        return
    within = _seconds(plans[0].layer.recomputed, rates, pair.inside())
    layer = _seconds(((eqn, 1) for eqn in plans[0].paid), rates, pair.inside())
    for plan in plans:
        took = within + plan.layers * layer
        yield plan.sizes, _Figures(plan.bytes, plan.moved_bytes, took)


def _seconds(
    eqns: Iterable[tuple[Any, int]], rates: Rates, shardings: Shardings
) -> float:
    of = lambda eqn: recompute_seconds(eqn, rates, shardings) or 0.0
    return sum(n * of(eqn) for eqn, n in eqns)


def _is_below(candidate: Candidate, flat: Sequence[Candidate]) -> bool:
    """Whether two of `flat`, each for some of the layers, would take more seconds."""
    if candidate.bytes < flat[-1].bytes:
        return True
    kept = [r.bytes for r in reversed(flat)]
    return candidate.seconds < np.interp(
        candidate.bytes, kept, [r.seconds for r in flat[::-1]]
    )
