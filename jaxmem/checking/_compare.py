"""Step and reference, run side by side from equal arguments, result by result."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jaxmem.checking._carry import Carry, carry_of
from jaxmem.checking._noise import Noise, seed_of
from jaxmem.checking._probes import Probes, run
from jaxmem.checking._report import LeafDifference
from jaxmem.checking._runs import Arguments, Results, Runner, copied, results_of
from jaxmem.checking._tolerance import RUNS, Distance, Tolerance, distance, tolerance


@dataclass
class StepComparison:
    """What a reference gives, and how far rounding moves it.

    Attributes:
      reference: the function that is right.
      arguments: positional ones and keyword ones, which stay as they are.
      static: places of those that are Python values.
      steps: how many calls, one after the other.
      asked: positions of the arguments that are fed back; None to find them.
    """

    reference: Callable
    arguments: Arguments
    static: Sequence[int | str]
    steps: int
    asked: Sequence[int] | None = None
    carry: Carry = field(default_factory=Carry, init=False)

    @cached_property
    def runner(self) -> Runner:
        """The reference, compiled once."""
        return Runner(self.reference, self.static)

    @cached_property
    def wanted(self) -> list[Results]:
        """The reference's results at each step."""
        ran = self.runner(*copied(self.arguments))
        self.carry = carry_of(self.arguments[0], ran, self.asked)
        self.steps = self.steps if self.carry else 1
        return [results_of(self.reference, ran), *self._more(self.runner, ran)]

    def differences(self, step: Callable) -> tuple[LeafDifference, ...]:
        """How far each result is off, at the first step where that is too far."""
        worst: dict[str, LeafDifference] = {}
        wanted = self.wanted
        runs = self._runs(Runner(step, self.static))
        for n, (got, want) in enumerate(zip(runs, wanted, strict=True)):
            _check_alike(got, want)
            for name, found in self._at(n, got, want).items():
                before = worst[name].ratio if name in worst else -1.0
                if before <= 1 and found.ratio > before:
                    worst[name] = found
        return tuple(worst.values())

    def arguments_at(self, step: int) -> Arguments:
        """The arguments of the reference's call number `step`, from 0."""
        _ = self.wanted  # which says what is carried
        arguments: Arguments = copied(self.arguments)
        for _ in range(step):
            ran = self.runner(*arguments)
            arguments = self.carry.next(ran, copied(self.arguments))
        return arguments

    def _at(self, n: int, got: Results, want: Results) -> dict[str, LeafDifference]:
        allowed = self._tolerances[n]
        return {
            name: difference(name, got[name], want[name], allowed[name], n)
            for name in want
        }

    @cached_property
    def _tolerances(self) -> list[dict[str, Tolerance]]:
        noise = noisy(self.reference, self.static)
        found: list[dict[str, list[Distance]]] = [{} for _ in self.wanted]
        for seed in map(seed_of, range(RUNS)):
            runs = self._runs(noise, seed)
            for at, want, got in zip(found, self.wanted, runs, strict=True):
                for name, value in got.items():
                    at.setdefault(name, []).append(distance(value, want[name]))
        return [
            {name: tolerance(drawn, want[name]) for name, drawn in at.items()}
            for at, want in zip(found, self.wanted, strict=True)
        ]

    def _runs(self, runner: Runner, seed: Any = 0) -> Iterator[Results]:
        args, kwargs = copied(self.arguments)
        ran = runner(args, kwargs, seed)
        yield results_of(self.reference, ran)
        yield from self._more(runner, ran, seed)

    def _more(self, runner: Runner, ran, seed: Any = 0) -> Iterator[Results]:
        for _ in range(self.steps - 1):
            ran = runner(*self.carry.next(ran, copied(self.arguments)), seed)
            yield results_of(self.reference, ran)


def noisy(fn: Callable, static: Sequence[int | str], keeps=False) -> Runner:
    """A runner of a step whose operations are off by roundings at random."""
    platform = jax.default_backend()

    def transform(jaxpr, leaves: list, seed):
        return run(jaxpr, leaves, Probes(Noise(seed, platform), keeps))

    return Runner(fn, static, transform)


def difference(
    name: str, got: np.ndarray, want: np.ndarray, allowed: Tolerance, step: int = 0
) -> LeafDifference:
    """The row of one result."""
    found = distance(got, want)
    return LeafDifference(
        name,
        f"{want.dtype.name}[{','.join(map(str, want.shape))}]",
        step + 1,
        found.largest,
        allowed.largest,
        allowed.ratio(found),
        found.apart,
        found.nans,
    )


def _check_alike(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> None:
    """ValueError where the two return different things altogether."""
    for mine, other, whose in ((got, want, "step"), (want, got, "reference")):
        if extra := [name for name in mine if name not in other]:
            raise ValueError(
                f"only the {whose} has {', '.join(extra[:3])}: step and reference must "
                "return the same pytree"
            )
    for name, x in got.items():
        if (x.shape, x.dtype) != (want[name].shape, want[name].dtype):
            kinds = [f"{a.dtype.name}{list(a.shape)}" for a in (x, want[name])]
            raise ValueError(
                f"{name} is {kinds[0]} of the step and {kinds[1]} of the reference: "
                "they must have one shape and dtype"
            )
