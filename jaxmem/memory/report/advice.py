"""What to do about a compiled step: asked for when somebody reads it.

What is found in a step, and what the passes make of it, packages above this one say.
"""

from dataclasses import dataclass, field
from typing import Any

from jaxmem import _adviser
from jaxmem._garbage import seldom_collected


@dataclass(frozen=True)
class AdvisedStep:
    """A compiled step, as advice is given on it.

    Attributes:
      closed: its closed jaxpr.
      donated: positions of inputs that are donated.
      specs: the types of its inputs, with their shardings.
      target: the chip it was compiled for.
      peak_bytes: of the compiled step.
      argument_bytes: of these, what it is given.
    """

    closed: Any
    donated: tuple[int, ...]
    specs: tuple[Any, ...]
    target: str
    peak_bytes: int = 0
    argument_bytes: int = 0


@dataclass(frozen=True)
class LateAdvice:
    """Advice that is not there yet."""

    known: tuple[str, ...] = ()  # before the compile
    step: AdvisedStep | None = field(default=None, repr=False)

    @seldom_collected()
    def lines(self) -> tuple[str, ...]:
        """What to do, what helps most first."""
        if self.step is None:
            return self.known
        try:
            return (*self.known, *_adviser.adviser(self.step))
        except Exception as error:  # the figures of a report do not depend on it
            failed = f"{type(error).__name__}: {error}"
            return (*self.known, f"what else would help could not be told ({failed})")

    def __reduce__(self):
        # a stored report has no step: jaxprs cannot be stored
        return LateAdvice, (self.known,)
