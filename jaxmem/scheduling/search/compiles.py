"""Choices of a step, compiled two at a time.

They are ranked by the buffers that the compiler assigns, after which it goes on to code
that nobody runs; on a TPU these are not quite the last, so what is taken is compiled to
the end. All are compiled with the same options: where XLA needs others for one of them
(`jaxmem.memory`), the bytes of all are those.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxmem.memory import CompileError, DoesNotFit, MemoryReport, Pending
from jaxmem.scheduling._choice import Choice, counted

_TIMEOUT = 600.0  # seconds for one compile


class BeginCompile(Protocol):
    """Starts the compile of a step under a choice."""

    def __call__(self, choice: Choice, **how: Any) -> Pending: ...


class OtherOptions(Exception):
    """A compile needed other options than those before it."""

    def __init__(self, products: int):
        super().__init__(products)
        self.products = products


class OutOfTime(Exception):
    """The time that a search was given is over."""


@dataclass
class Compiles:
    """Compiles of one step, all with the same options."""

    begin: BeginCompile  # starts one
    deadline: float | None = None  # of `time.monotonic()`; None for none
    products: int | None = None  # the option that all are compiled with, see `Pending`
    # what the compiler said of choices that it fails on, though not for want of memory
    refused: dict[Choice, str] = field(default_factory=dict, init=False)
    # bytes that it said of choices that did not fit once they were compiled to the end
    needed: dict[Choice, int] = field(default_factory=dict, init=False)
    _begun: dict[Choice, Pending] = field(default_factory=dict, init=False)
    _reports: dict[Choice, MemoryReport | None] = field(
        default_factory=dict, init=False
    )
    _final: set[Choice] = field(default_factory=set, init=False)

    def ahead(self, choices: Sequence[Choice]) -> None:
        """Starts these; no others are asked for soon."""
        for choice in [c for c in self._begun if c not in choices]:
            self._begun.pop(choice).cancel()
        for choice in choices:
            if choice not in self._begun and choice not in self._reports:
                self._begun[choice] = self._start(choice)

    def __call__(self, choice: Choice) -> MemoryReport | None:
        """Bytes by the assigned buffers; None if there is no way to fit the chip."""
        if choice not in self._reports:
            pending = self._begun.pop(choice, None) or self._start(choice)
            self._reports[choice] = self._unless_refused(choice, pending)
            self._final |= {choice} if pending.final else set()
        return self._reports[choice]

    def settled(self, choice: Choice) -> MemoryReport | None:
        """The report that is told to the user, all its figures final."""
        if choice in self._final:
            return self._reports[choice]
        how = {"timeout": _TIMEOUT, "products": self.products}
        try:
            return self.begin(choice, extent="needed", **how).result()
        except DoesNotFit as error:
            if error.needed_bytes is not None:
                self.needed[choice] = error.needed_bytes
            return None

    def close(self) -> None:
        self.ahead(())

    def left(self) -> float:
        """Seconds until the deadline; raises where there are none."""
        if self.deadline is None:
            return math.inf
        if (left := self.deadline - time.monotonic()) <= 0:
            raise OutOfTime
        return left

    def _start(self, choice: Choice) -> Pending:
        how = {"timeout": min(_TIMEOUT, self.left()), "products": self.products}
        return self.begin(choice, extent="buffers", **how)

    def _unless_refused(self, choice: Choice, pending: Pending) -> MemoryReport | None:
        try:
            return self._result(pending)
        except CompileError as error:
            if not choice.configs:  # the step that keeps all: of it the user must know
                raise
            self.refused[choice] = str(error).strip().splitlines()[0]
            return None

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for what the compiler failed on, if anything."""
        if not self.refused:
            return ()
        choices, first = counted(len(self.refused)), next(iter(self.refused.values()))
        return (f"the compiler failed on {choices}, which could not be taken: {first}",)

    def _result(self, pending: Pending) -> MemoryReport | None:
        try:
            report = pending.result()
        except DoesNotFit:
            return None
        except TimeoutError:
            if self.deadline is None or time.monotonic() < self.deadline:
                raise
            raise OutOfTime from None
        if pending.products is not None and pending.products != self.products:
            raise OtherOptions(pending.products)
        return report


@dataclass(frozen=True)
class Compared:
    """Two reports, with None where the compiler refuses: it does not fit the chip."""

    plain: MemoryReport | None
    scheduled: MemoryReport | None


def compared(
    plain: Callable[..., Pending],
    scheduled: Callable[..., Pending],
    known: MemoryReport | None = None,
    products: int | None = None,
) -> Compared:
    """Compiles both, or one where the other is known, with the same options."""
    # `plain` and `scheduled` start a compile; `known` is the report of the scheduled
    # step, and `products` the option that it was compiled with.
    while True:
        begun = [plain(products=products)]
        begun += [scheduled(products=products)] if known is None else []
        reports = [_report(one) for one in begun]
        asked = (one.products for one in begun if one.products is not None)
        needed = max(asked, default=None)
        if needed == products:
            return Compared(reports[0], known if known is not None else reports[1])
        products, known = needed, None  # what one needs, both get


def _report(pending: Pending) -> MemoryReport | None:
    try:
        return pending.result()
    except DoesNotFit:
        return None
