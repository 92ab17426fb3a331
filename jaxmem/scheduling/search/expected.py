"""What `schedule` is expected to take, without a compile: the passes are asked alone.

A few choices that may take least are looked at, and not all of a search.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmem.ir.graph import by_shape
from jaxmem.ir.shards import of_shardings
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling._remembered import Remembered
from jaxmem.scheduling._shardings import argument_shardings
from jaxmem.scheduling.search.front import pareto_front, space_of
from jaxmem.scheduling.search.front_segments import in_segments
from jaxmem.scheduling.search.micro_batch_front import first_counts
from jaxmem.scheduling.search.traced_step import TracedStep
from jaxmem.scheduling.tiling.micro_batches import MicroBatches

_PARTS = (8, 64)  # micro-batches
_ENOUGH = 0.2  # of the plain peak: where that is reached, nothing else is looked at


@dataclass(frozen=True)
class ExpectedPeaks:
    """Bytes that are predicted, arguments included.

    Attributes:
      arguments: of what is there before the step.
      plain: of the step as it was given.
      free: where nothing that costs time is done.
      least: of the choices that were looked at.
      parts: micro-batches of the least; 1 for none.
    """

    arguments: int
    plain: int
    free: int
    least: int
    parts: int = 1


def expected_peaks(
    closed, donated: Sequence[int], specs: Sequence[Any], target: str
) -> ExpectedPeaks:
    """What a step takes as it is, and what `schedule` is expected to make of it.

    Args:
      closed: its closed jaxpr.
      donated: positions of inputs that are donated.
      specs: the types of its inputs, with their shardings.
      target: the chip.
    """
    step = _traced(closed, donated, argument_shardings(tuple(specs)), target)
    plain = Choice(target, unchanged=True)
    arguments, own = step.sizes_of(step.rewritten(plain).jaxpr)
    free = min(own, step.predicted(Choice(target)))
    least, parts = free, 1
    for choice in _choices(step):
        peak = step.predicted(choice)
        if peak < least:
            least, parts = peak, choice.get(MicroBatches).n
        if least < _ENOUGH * own:
            break
    sizes = (arguments + size for size in (own, free, least))
    return ExpectedPeaks(arguments, *sizes, parts)


def _choices(step: TracedStep) -> Iterator[Choice]:
    """Those that recompute most, and some numbers of micro-batches."""
    plain = Choice(step.target)
    first = step.rewritten(plain, ordered=False)
    space = space_of(first.pairs, first.lists, step.target)
    if space.scans and not space.is_unrolled:
        front = pareto_front(space)
        yield front[-1].choice
        yield from (one.choice for one in in_segments(space, front)[-1:])
    for least in _PARTS:
        for n in first_counts(step, least):
            yield plain.having(MicroBatches(n))


def _traced(closed, donated, shardings, target: str) -> TracedStep:
    known = Remembered()
    aliases = functools.partial(by_shape, inputs=donated)

    @functools.cache
    def rewritten(choice: Choice, ordered: bool = True):
        how = None, choice, shardings, known, ordered
        return rewrite(closed, aliases(closed), *how)

    spreads = of_shardings(closed, shardings)
    about = None, closed, (), (), {}, target, "", None, known, spreads
    return TracedStep(rewritten, aliases, *about)
