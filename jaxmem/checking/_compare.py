"""Step and reference, run side by side from equal arguments, result by result."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from jaxmem.checking._tolerance import (
    OUT_OF_DOUBT,
    RUNS,
    Distance,
    Tolerance,
    distance,
    tolerance,
)

Tolerances = list[dict[str, Tolerance]]  # of each call, by the names of results


@dataclass(frozen=True)
class Differences:
    """How far the results of a step are off.

    Attributes:
      leaves: each result, at the first call where that is too far.
      note: why the step's own roundings are not known, where they were asked for.
    """

    leaves: tuple[LeafDifference, ...]
    note: str = ""

    @property
    def share(self) -> float:
        """The largest that a result has of its tolerance."""
        return max((leaf.ratio for leaf in self.leaves), default=0.0)


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

    def differences(self, step: Callable, explain: bool = False) -> Differences:
        """How far each result is off, at the first call where that is too far.

        In doubt, the step's own roundings count as well as the reference's: they are
        measured there alone, as they take as long as those of the reference. `explain`:
        to measure them wherever a result differs, for what can be said of it.
        """
        runner = Runner(step, self.static)
        found = Differences(self._worst(self._runs(runner)))
        if found.share <= 1 or not (explain or found.share <= OUT_OF_DOUBT):
            return found
        try:
            got = list(self._runs(runner))
            own = self._roundings(step, got)
        except Exception as error:  # what is called may be no function that is traced
            why = f"{type(error).__name__}: {error}"
            note = f"how far rounding moves the step's results is not known: {why}"
            return Differences(found.leaves, note)
        return Differences(self._worst(got, own))

    def _worst(
        self, runs: Iterable[Results], own: Tolerances | None = None
    ) -> tuple[LeafDifference, ...]:
        worst: dict[str, LeafDifference] = {}
        for n, (got, want) in enumerate(zip(runs, self.wanted, strict=True)):
            _check_alike(got, want)
            for name, found in self._at(n, got, want, own).items():
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

    def _at(
        self, n: int, got: Results, want: Results, own: Tolerances | None
    ) -> dict[str, LeafDifference]:
        return {
            name: difference(
                name,
                got[name],
                want[name],
                self._tolerances[n][name],
                own[n][name] if own else None,
                n,
            )
            for name in want
        }

    @cached_property
    def _tolerances(self) -> Tolerances:
        return self._roundings(self.reference, self.wanted)

    def _roundings(self, fn: Callable, plain: Sequence[Results]) -> Tolerances:
        """What rounding does to a function whose results without noise are `plain`."""
        noise = noisy(fn, self.static)
        found: list[dict[str, list[Distance]]] = [{} for _ in plain]
        for seed in map(seed_of, range(RUNS)):
            runs = self._runs(noise, seed)
            for at, usual, got in zip(found, plain, runs, strict=True):
                for name, value in got.items():
                    at.setdefault(name, []).append(distance(value, usual[name]))
        return [
            {name: tolerance(drawn, usual[name]) for name, drawn in at.items()}
            for at, usual in zip(found, plain, strict=True)
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
    name: str,
    got: np.ndarray,
    want: np.ndarray,
    reference: Tolerance,
    step: Tolerance | None = None,
    n: int = 0,
) -> LeafDifference:
    """The row of one result, by the roundings of the reference, or of both."""
    found = distance(got, want)
    allowed = reference.with_step(step) if step else reference
    return LeafDifference(
        name,
        f"{want.dtype.name}[{','.join(map(str, want.shape))}]",
        n + 1,
        found.largest,
        allowed.largest,
        allowed.ratio(found),
        found.apart,
        found.nans,
        reference.times(step, found) if step else None,
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
