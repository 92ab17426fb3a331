"""What `schedule` is expected to take, without a compile: the passes are asked alone.

A few choices that may take least are looked at, and not all of a search.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxmem.ir.graph import by_shape
from jaxmem.ir.shards import of_shardings
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling._remembered import Remembered
from jaxmem.scheduling._shardings import argument_shardings
from jaxmem.scheduling.search.front import Candidate, pareto_front, space_of
from jaxmem.scheduling.search.front_segments import in_segments
from jaxmem.scheduling.search.micro_batch_front import first_counts
from jaxmem.scheduling.search.sequences import of_sequences
from jaxmem.scheduling.search.traced_step import TracedStep
from jaxmem.scheduling.tiling.micro_batches import MicroBatches

_PARTS = 16  # micro-batches
_PATIENCE = 2.0  # seconds for sequences of operations outside of loops
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
    free = own
    if _does_something(step):  # else a difference is one of predictions alone
        free = min(own, step.predicted(Choice(target)))
    least, parts = free, 1
    for one in _candidates(step):
        if one.bytes < least:
            least, parts = one.bytes, one.choice.get(MicroBatches).n
        if least < _ENOUGH * own:
            break
    known = {"plain": own, "free": free, "least": least}
    sizes = {name: arguments + size for name, size in known.items()}
    return ExpectedPeaks(arguments, **sizes, parts=parts)


def _does_something(step: TracedStep) -> bool:
    """Whether without a budget gradients are released, or residuals not kept."""
    done = step.rewritten(Choice(step.target)).description
    released = any(row.released for row in done.gradients)
    return released or any(row.bytes > 0 for row in done.residuals)


def _candidates(step: TracedStep) -> Iterator[Candidate]:
    """Those that recompute most, and micro-batches; `bytes` are of peaks."""
    plain = Choice(step.target)
    first = step.rewritten(plain, ordered=False)
    space = space_of(first.pairs, first.lists, step.target)
    if space.is_unrolled:
        yield from of_sequences(step, plain, _PATIENCE)[-1:]
    elif space.scans:
        front = pareto_front(space)
        for one in (*front[-1:], *in_segments(space, front)[-1:]):
            yield replace(one, bytes=step.predicted(one.choice))
    for n in first_counts(step, _PARTS):
        choice = plain.having(MicroBatches(n))
        yield Candidate(choice, step.predicted(choice), 0.0)


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
