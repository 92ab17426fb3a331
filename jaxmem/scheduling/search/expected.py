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
from jaxmem.scheduling._passes import rewrite, searched
from jaxmem.scheduling._remembered import Remembered
from jaxmem.scheduling._searched import Candidate, SearchedStep, start_of
from jaxmem.scheduling._shardings import argument_shardings
from jaxmem.scheduling.search.traced_step import TracedStep

_ENOUGH = 0.2  # of the plain peak: where that is reached, nothing else is looked at


@dataclass(frozen=True)
class ExpectedPeaks:
    """Bytes that are predicted, arguments included.

    Attributes:
      arguments: of what is there before the step.
      plain: of the original step.
      free: where nothing that costs time is done.
      least: of the choices that were looked at.
      slower: what the least of them does that takes time.
    """

    arguments: int
    plain: int
    free: int
    least: int
    slower: str = ""


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
    least, slower = free, ""
    for size, does in _candidates(step, _ENOUGH * own):
        if size < least:
            least, slower = size, does
        if least < _ENOUGH * own:
            break
    known = {"plain": own, "free": free, "least": least}
    sizes = {name: arguments + size for name, size in known.items()}
    return ExpectedPeaks(arguments, **sizes, slower=slower)


def _does_something(step: TracedStep) -> bool:
    """Whether without a budget gradients are released, or residuals not kept."""
    done = step.rewritten(Choice(step.target), ordered=False).description
    released = any(row.released for row in done.gradients)
    return released or any(row.bytes > 0 for row in done.residuals)


def _candidates(step: TracedStep, enough: float) -> Iterator[tuple[int, str]]:
    """What the passes expect to take least; soon found comes first.

    Nothing here depends on how fast or busy the machine is.
    """
    plain = Choice(step.target)
    asked, passes = SearchedStep(step), searched()
    front = start_of(asked, passes) or [Candidate(plain, step.predicted(plain), 0)]
    asked = replace(asked, front=front)
    for one in sorted(passes, key=lambda one: (one.in_parts, not one.whole_step)):
        yield from one.expected(asked, enough)


def _traced(closed, donated, given, target: str) -> TracedStep:
    known = Remembered()
    aliases = functools.partial(by_shape, inputs=donated)

    @functools.cache
    def rewritten(choice: Choice, ordered: bool = True):
        how = None, choice, given, known, ordered
        return rewrite(closed, aliases(closed), *how)

    shardings = of_shardings(closed, given)
    about = None, closed, (), (), {}, target, "", None, known, shardings
    return TracedStep(rewritten, aliases, *about)
