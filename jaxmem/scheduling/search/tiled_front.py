"""Candidates that run regions in tiles, in one front with those that only recompute.

What is kept and what runs at one time add up to a peak, and either can be made less:
by recomputation, or by tiles. So each rate of recomputation is combined with limits for
what runs at one time, each half of the one before. Two predictions for a limit, with
most kept and with least, say what its peak is between.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jaxmem.ir.scans import is_var, size_of
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling.plan.rows import TiledRegion
from jaxmem.scheduling.predict.operations import (
    as_compiled,
    compiled_peak,
    operations_of,
)
from jaxmem.scheduling.predict.tpu import is_tpu
from jaxmem.scheduling.search.front import LEAST, Candidate, descending
from jaxmem.scheduling.search.traced_step import TracedStep
from jaxmem.scheduling.tiling.tiles import Tiles

_HALVINGS = 6  # of what runs at one time, to the least limit


def can_tile(step: TracedStep, candidate: Candidate) -> bool:
    """Whether there is a region in a step that tiles make smaller."""
    limit = _at_one_time(step, candidate) >> _HALVINGS
    return bool(_rows(step, candidate.choice.having(Tiles(limit=limit))))


def with_tiles(step: TracedStep, flat: Sequence[Candidate]) -> list[Candidate]:
    """The front of these candidates, as they are and in tiles; `bytes` are of peaks.

    Of those that take equally long, the ones of fewer tiles come first.
    """
    lines = [_line(step, flat, Tiles()), *_lines(step, flat)]
    found = [line.candidate(one) for line in lines for one in flat]
    found.sort(key=lambda candidate: (candidate.seconds, -candidate.bytes))
    return descending(found, LEAST * found[0].bytes)


@dataclass(frozen=True)
class _Line:
    """Peaks and seconds under one configuration of tiles, linear in what is kept."""

    config: Tiles
    kept: tuple[int, int]  # most, least
    peaks: tuple[int, int]
    seconds: tuple[float, float]  # of tiles

    def candidate(self, flat: Candidate) -> Candidate:
        most, least = self.kept
        share = (flat.bytes - least) / (most - least) if most > least else 0.0
        between = lambda ends: ends[1] + share * (ends[0] - ends[1])
        return replace(
            flat,
            choice=flat.choice.having(self.config),
            bytes=round(between(self.peaks)),
            seconds=flat.seconds + max(0.0, between(self.seconds)),
        )


def _lines(step: TracedStep, flat: Sequence[Candidate]) -> Iterator[_Line]:
    """One for each limit that makes another number of tiles."""
    poor, seen = flat[-1], {()}
    limit = _at_one_time(step, poor)
    for _ in range(_HALVINGS):
        limit //= 2
        rows = _rows(step, poor.choice.having(Tiles(limit=limit)))
        if rows not in seen:
            seen.add(rows)
            yield _line(step, flat, Tiles(limit=limit))


def _at_one_time(step: TracedStep, candidate: Candidate) -> int:
    """Bytes beside what is kept, and beside what the step gives back."""
    jaxpr = step.rewritten(candidate.choice).unordered
    in_place = step.aliases(jaxpr)
    outs = (v for i, v in enumerate(jaxpr.jaxpr.outvars) if i not in in_place)
    made = sum(size_of(v) for v in outs if is_var(v))
    return max(0, _peak(step, candidate.choice) - candidate.bytes - made)


def _rows(step: TracedStep, choice: Choice) -> tuple[TiledRegion, ...]:
    return step.rewritten(choice).description.tiles


def _line(step: TracedStep, flat: Sequence[Candidate], config: Tiles) -> _Line:
    ends = flat[0], flat[-1]
    choices = [one.choice.having(config) for one in ends]
    seconds = [sum(row.seconds for row in _rows(step, c)) for c in choices]
    peaks = [_peak(step, c) for c in choices]
    kept = ends[0].bytes, ends[1].bytes
    return _Line(config, kept, (peaks[0], peaks[1]), (seconds[0], seconds[1]))


def _peak(step: TracedStep, choice: Choice) -> int:
    """Bytes of a rewritten step, without its arguments."""
    jaxpr, tpu = step.rewritten(choice).unordered, is_tpu(step.target)
    ops = operations_of(jaxpr, step.aliases(jaxpr), tpu=tpu)
    return compiled_peak(as_compiled(ops, tpu))
