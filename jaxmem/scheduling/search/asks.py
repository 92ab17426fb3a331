"""What a search says to who compiles for it.

A search is a generator: it yields the compile that it asks for, and is sent the trial
that came of it. So it can be gone through a second time with the same trials, and one
more that is supposed, to see what it would ask for after the next compile.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling.search.result import BudgetError, ReportedTrial

T = TypeVar("T")


@dataclass(frozen=True)
class Ask:
    """A compile that a search asks for.

    Attributes:
      choice: what the passes do.
      seconds: that are predicted for it, see `Trial`.
      expected: bytes of its peak; None where nothing is known yet.
      following: what is probably asked for next.
      settled: whether it is compiled to the end, or its assigned buffers will do.
      ahead: whether it is only begun, and no trial is waited for.
    """

    choice: Choice
    seconds: float = 0.0
    expected: float | None = None
    following: tuple[Choice, ...] = ()
    settled: bool = False
    ahead: bool = False


# It is sent a `ReportedTrial`, or None where none is waited for.
Search = Generator[Ask, Any, T]


def foreseen(begin: Callable[[], Search[T]], budget: int) -> Search[T]:
    """The search that `begin` begins, which tells what it probably asks for next."""
    said: list[ReportedTrial] = []
    search = begin()
    try:
        ask = next(search)
        while True:
            following = _following(begin, said, ask, budget)
            said.append((yield replace(ask, following=following)))
            ask = search.send(said[-1])
    except StopIteration as end:
        return end.value


def _following(
    begin: Callable[[], Search[Any]],
    said: Sequence[ReportedTrial],
    ask: Ask,
    budget: int,
) -> tuple[Choice, ...]:
    """What is asked for after this; empty where it is the last."""
    for peak in _supposed(ask, budget):
        supposed = ReportedTrial(ask.choice, peak, ask.expected, ask.seconds)
        search = begin()
        try:
            for trial in (None, *said):
                search.send(trial)
            return (search.send(supposed).choice,)
        except (StopIteration, BudgetError):
            continue
    return ()


def _supposed(ask: Ask, budget: int) -> Iterator[float]:
    """Peaks: as expected, else one that does not fit."""
    yield float(budget) if ask.expected is None else ask.expected
    yield budget + 1.0
