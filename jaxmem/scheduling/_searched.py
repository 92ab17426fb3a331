"""What a search asks of a pass: candidates, with their bytes and seconds.

A pass that a search varies is a subclass of `Searched`. The search asks those in
`_passes.PASSES` from the last to the first: what is changed least comes first, the
whole step last. Those are taken first of which a fast candidate is expected to fit;
then each pass is asked for candidates that would take less time than what was found.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._pass import C, Pass, R
from jaxmem.scheduling._rewritten import Rewritten
from jaxmem.scheduling.search.traced_step import TracedStep

LEAST = 2e-3  # of what is kept at first: what two candidates differ by, or they are one


@dataclass(frozen=True)
class Candidate:
    """A choice, and what is predicted for it."""

    choice: Choice  # what the passes are asked to do
    # what is kept from the forward to the backward pass, or another figure that differs
    # from the peak by about as much on every candidate
    bytes: int
    seconds: float  # beyond those of the step that keeps all; negative if it is faster


def descending(candidates: Sequence[Candidate], least: float) -> list[Candidate]:
    """Those that keep less than the one before, by more than `least` bytes."""
    kept = list(candidates[:1])
    for candidate in candidates[1:]:
        if kept[-1].bytes - candidate.bytes > least:
            kept.append(candidate)
    return kept


@dataclass(frozen=True)
class Between:
    """Some layers like one candidate, the others like another.

    Attributes:
      layers: how many there are.
      first: the candidate in which so many of the first take fewer bytes.
      gain: seconds that are saved at most: if hardly any layer does.
    """

    layers: int
    first: Callable[[int], Candidate]
    gain: float


Front = Sequence[Candidate]  # by descending bytes and ascending seconds


def having(configs: Sequence[Any], front: Front) -> Front:
    """These candidates, with other configurations besides."""
    return [replace(one, choice=one.choice.having(*configs)) for one in front]


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
        """Whether its seconds are below that."""
        ...


@dataclass(frozen=True)
class SearchedStep:
    """A step, and what is asked for, as passes are told.

    Attributes:
      traced: rewrites it under a choice, and predicts its peak.
      named: whether only what has a `checkpoint_name` may be kept.
      offload: bytes of a device's residuals that may be in the host's memory.
      limit: bytes of a compiled peak that will do.
      base: configurations of all candidates that recompute: they save bytes, and no
        compiled step took longer with them.
      front: candidates that recompute, and do nothing else that costs.
      left: seconds that the search still has.
      refined: a front together with what passes make of it that were asked before.
    """

    traced: TracedStep
    named: bool = False
    offload: float = 0
    limit: float = math.inf
    base: Sequence[Any] = ()
    front: Front = ()
    left: Callable[[], float] = lambda: math.inf
    refined: Callable[[Front], Front] = lambda front: front

    @property
    def target(self) -> str:
        return self.traced.target


def start_of(step: SearchedStep, passes: Sequence["Searched"]) -> Front:
    """What the first pass that knows it without a search would start from."""
    return next(filter(None, (one.start(step) for one in passes)), ())


class Searched(Pass[C, R]):
    """A pass whose configuration a search varies."""

    # whether what it does at no cost is asked of all candidates, where it pays at first
    for_all: ClassVar[bool] = False
    # whether what it does at no cost is tried on any candidate that nearly fits
    anywhere: ClassVar[bool] = False
    # whether it changes how the whole step runs, so that peaks of others tell nothing
    # of its own
    whole_step: ClassVar[bool] = False
    # of the step's own seconds, that its candidates must save to be taken for others
    margin: ClassVar[float] = 0.0
    # how many of the last candidates that it is in may be the least once compiled
    last: ClassVar[int] = 1

    def free(self, step: SearchedStep) -> Iterator[C]:
        """Configurations that cost no time, and may take fewer bytes."""
        return iter(())

    def nearly_free(self, step: SearchedStep) -> Iterator[C]:
        """As `free`, of which only a compile tells whether it costs time.

        `step.front` is what they are for; each takes fewer bytes than the one before,
        and longer.
        """
        return iter(())

    def undone(self, step: SearchedStep, choice: Choice) -> Iterator[C]:
        """What does less and less of what takes a few bytes for its time."""
        return iter(())

    def is_vain(self, step: SearchedStep) -> bool:
        """Whether what it does at no cost neither fits nor tells anything."""
        return False

    def front(self, step: SearchedStep, base: Choice) -> Front:
        """What a search starts from; `base`: what all candidates do."""
        return ()

    def other_form(self, step: SearchedStep) -> Front:
        """As `front` in another form, of which only compiling tells if it is faster."""
        return ()

    def candidates(self, step: SearchedStep, bound: SearchBound) -> Front:
        """Choices that take fewer bytes than those of `step.front`, or less time."""
        return ()

    def alone(self, step: SearchedStep, bound: SearchBound) -> Front:
        """What is expected to fit in time by itself, where that is soon told."""
        return ()

    def refined(self, step: SearchedStep, front: Front) -> Front:
        """A front of another pass, together with what this one makes of it."""
        return front

    def between(
        self, step: SearchedStep, rich: Candidate, poor: Candidate
    ) -> Between | None:
        """What lies between two candidates, if anything."""
        return None

    def start(self, step: SearchedStep) -> Front:
        """As `front`, without a search; empty where it takes one."""
        return ()

    def expected(self, step: SearchedStep, enough: float) -> Iterator[tuple[int, str]]:
        """(predicted peak, what it does that takes time) of what may take least.

        Without a compile or a search. `enough`: bytes that will do.
        """
        return iter(())

    def unreached(self, step: SearchedStep, made: Rewritten) -> Sequence[str]:
        """Sentences on what it could not make less; `made`: the step at its least."""
        return ()
