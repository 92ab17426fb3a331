"""What a search asks of a pass: candidates, with their bytes and seconds.

A pass that a search varies is a subclass of `Searched`. The search asks those in
`_passes.PASSES` from the last to the first: what is changed least comes first, the
whole step last. The first candidates of which one fits are taken; then each pass is
asked for those that would take less time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from jaxmem.scheduling._candidate import Between, Candidate
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._pass import C, Pass, R
from jaxmem.scheduling._rewritten import Rewritten
from jaxmem.scheduling.search.traced_step import TracedStep

Front = Sequence[Candidate]  # by descending bytes and ascending seconds


class SearchBound(Protocol):
    """What a candidate has to be within to be worth a compile."""

    @property
    def limit(self) -> float:
        """Bytes of a compiled peak that will do."""
        ...

    @property
    def least(self) -> float:
        """The least peak that was compiled."""
        ...

    @property
    def seconds(self) -> float:
        """What it takes less than; infinity where nothing is known to fit."""
        ...

    def above(self, choice: Choice, unknown: float) -> float:
        """Bytes that a choice, or another one, took above its predicted peak."""
        ...

    def allows(self, one: Candidate) -> bool:
        """Whether its seconds are below that, and it recomputes no more products."""
        ...


@dataclass(frozen=True)
class SearchedStep:
    """A step, and what is asked for, as passes are told.

    Attributes:
      traced: rewrites it under a choice, and predicts its peak.
      named: whether only what has a `checkpoint_name` may be kept.
      offload: whether what is kept may wait in the host's memory.
      limit: bytes of a compiled peak that will do.
      front: candidates that recompute, and do nothing else that costs.
      left: seconds that the search still has.
      refined: a front together with what passes make of it that were asked before.
    """

    traced: TracedStep
    named: bool = False
    offload: bool = False
    limit: float = math.inf
    front: Front = ()
    left: Callable[[], float] = lambda: math.inf
    refined: Callable[[Front], Front] = lambda front: front

    @property
    def target(self) -> str:
        return self.traced.target


class Searched(Pass[C, R]):
    """A pass whose configuration a search varies."""

    # whether what it does at no cost is asked of all candidates, where it pays at first
    for_all: ClassVar[bool] = False
    # whether what it does at no cost is tried on any candidate that nearly fits
    anywhere: ClassVar[bool] = False
    # whether it changes how the whole step runs, so that peaks of others tell nothing
    # of its own, and its seconds count what operations write
    whole_step: ClassVar[bool] = False
    # of the step's own seconds, that its candidates must save to be taken for others
    margin: ClassVar[float] = 0.0

    def free(self, step: SearchedStep) -> Iterator[C]:
        """Configurations that cost no time, and may take fewer bytes."""
        del step
        return iter(())

    def is_vain(self, step: SearchedStep) -> bool:
        """Whether what it does at no cost neither fits nor tells anything."""
        del step
        return False

    def front(self, step: SearchedStep, base: Choice) -> Front:
        """What a search starts from; `base`: what all candidates do."""
        del step, base
        return ()

    def candidates(self, step: SearchedStep, bound: SearchBound) -> Front:
        """Choices that take fewer bytes than those of `step.front`, or less time."""
        del step, bound
        return ()

    def uncertain(self, config: C) -> float:
        """How many of the last candidates may be the least once they are compiled.

        `config`: of the last of them.
        """
        del config
        return 1

    def refined(self, step: SearchedStep, front: Front) -> Front:
        """A front of another pass, together with what this one makes of it."""
        del step
        return front

    def between(
        self, step: SearchedStep, rich: Candidate, poor: Candidate
    ) -> Between | None:
        """What lies between two candidates, if anything."""
        del step, rich, poor
        return None

    def unreached(self, step: SearchedStep, made: Rewritten) -> Sequence[str]:
        """Sentences on what it could not make less; `made`: the step at its least."""
        del step, made
        return ()
