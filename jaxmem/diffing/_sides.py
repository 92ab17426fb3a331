"""What is compared: a saved report, a step in this process, or one in another."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

from jaxmem._checks import wrong_type
from jaxmem.diffing._interpreter import Interpreter
from jaxmem.diffing._program import Program, loaded
from jaxmem.memory import MemoryReport, begin, estimate


class Side(Protocol):
    """One of the two that are compared."""

    def report(self) -> Callable[[], MemoryReport]:
        """Begins a compile of the step; call the result for its report."""
        ...

    def program(self) -> str:
        """The step as plain JAX."""
        ...

    def temp_bytes(self, text: str) -> Callable[[], int]:
        """Begins a compile of a program in plain JAX; its bytes of temporaries."""
        ...

    def version(self) -> str:
        """Of jax; "" where that is not known."""
        ...


@dataclass(frozen=True)
class SavedReport:
    """A report of an estimate that has been made."""

    found: MemoryReport

    def report(self) -> Callable[[], MemoryReport]:
        return lambda: self.found

    def program(self) -> str:
        raise ValueError("reduce: a saved report has no step; give MODULE:FUNCTION")

    def temp_bytes(self, text: str) -> Callable[[], int]:
        raise ValueError("reduce: a saved report has no step; give MODULE:FUNCTION")

    def version(self) -> str:
        return ""


@dataclass(frozen=True)
class StepHere:
    """A step of this process.

    Attributes:
      step: the step.
      args: its positional arguments.
      options: keyword arguments of `jaxmem.estimate`.
    """

    step: Callable
    args: tuple
    options: dict[str, Any] = field(default_factory=dict)

    def report(self) -> Callable[[], MemoryReport]:
        found = estimate(self.step, *self.args, **self.options)
        return lambda: found

    def program(self) -> str:
        return Program.of_step(self.step, self.args, self.options).text()

    def temp_bytes(self, text: str) -> Callable[[], int]:
        step, args, donated = loaded(text)
        how = ("target", "timeout", "compiler_options")
        given = {k: v for k, v in self.options.items() if k in how}
        pending = begin(step, tuple(args), {}, donate=donated, advised=False, **given)
        return lambda: pending.result().temp_bytes

    def version(self) -> str:
        return jax.__version__


@dataclass(frozen=True)
class StepElsewhere:
    """A step of another process, which has loaded it."""

    interpreter: Interpreter

    def report(self) -> Callable[[], MemoryReport]:
        answer = self.interpreter.ask("report")
        return lambda: MemoryReport.from_json(json.dumps(answer()))

    def program(self) -> str:
        return self.interpreter.ask("program")()

    def temp_bytes(self, text: str) -> Callable[[], int]:
        return self.interpreter.ask("temp_bytes", text=text)

    def version(self) -> str:
        return self.interpreter.ask("version")()


def step_here(name: str, given: Any, options: dict[str, Any]) -> StepHere:
    """The side of (step, args) or (step, args, options)."""
    match given:
        case (step, tuple(args)) if callable(step):
            return StepHere(step, args, options)
        case (step, tuple(args), dict(own)) if callable(step):
            return StepHere(step, args, own | options)
    raise wrong_type(
        name,
        given,
        "a MemoryReport, the path of a saved one (.json), 'MODULE:FUNCTION', or a "
        "tuple (step, args) or (step, args, options)",
    )
