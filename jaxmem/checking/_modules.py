"""The first module whose value differs, of those that both traces name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmem.checking._compare import difference, noisy
from jaxmem.checking._noise import seed_of
from jaxmem.checking._probes import Probes, run
from jaxmem.checking._runs import Arguments, Runner, copied, on_host
from jaxmem.checking._tolerance import RUNS, distance, tolerance

_AGREE = (
    "every module that both name agrees where its value is a result: the difference is "
    "outside of them, or the compiler's"
)
_NONE = "step and reference have no module in common: no name scope is in both"


@dataclass(frozen=True)
class FirstModule:
    """Where the values of two steps begin to differ.

    Attributes:
      path: of the module; empty where there is none.
      where: the user's line of it, if it is known.
      note: why there is none.
    """

    path: str = ""
    where: str = ""
    note: str = ""


def first_module(
    step: Callable,
    reference: Callable,
    arguments: Arguments,
    static: Sequence[int | str],
) -> FirstModule:
    """Runs both once more, with the last value of each module as further results."""
    lines: dict[str, str] = {}
    want = _values(probed(reference, static, lines), arguments)
    got = _values(probed(step, static, {}), arguments)
    common = [k for k in _forward_first(lines) if k in got and _fits(got[k], want[k])]
    if not common:
        return FirstModule(note=_NONE)
    noise = noisy(reference, static, keeps=True)
    drawn: dict[str, list] = {k: [] for k in common}
    for seed in map(seed_of, range(RUNS)):
        values = _values(noise, arguments, seed)
        for key in common:
            drawn[key].append(distance(values[key], want[key]))
    for key in common:
        allowed = tolerance(drawn[key], want[key])
        mine = got[key].reshape(want[key].shape)
        if difference(key, mine, want[key], allowed).ratio > 1:
            return FirstModule(key, lines[key])
    return FirstModule(note=_AGREE)


def probed(fn: Callable, static: Sequence[int | str], lines: dict[str, str]) -> Runner:
    """A runner of a step that also gives the last value of each module."""

    def transform(jaxpr, leaves: list, seed):
        del seed
        return run(jaxpr, leaves, Probes(None, True, lines=lines))

    return Runner(fn, static, transform)


def _values(
    runner: Runner, arguments: Arguments, seed: Any = 0
) -> dict[str, np.ndarray]:
    seen = runner(*copied(arguments), seed).seen
    return {name: on_host(x) for name, x in seen.items()}


def _forward_first(lines: dict[str, str]) -> list[str]:
    return sorted(lines, key=lambda key: key.endswith("(backward)"))


def _fits(mine: np.ndarray, other: np.ndarray) -> bool:
    """Whether one is the other, up to loops that run in several parts."""
    same = mine.shape[-1:] == other.shape[-1:] and mine.size == other.size
    return same and mine.dtype == other.dtype
