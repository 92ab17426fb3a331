"""The first module whose value differs, of those that both traces name."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmem.checking._compare import noisy
from jaxmem.checking._noise import seed_of
from jaxmem.checking._probes import Place, Probes, run
from jaxmem.checking._runs import Arguments, Runner, copied, on_host
from jaxmem.checking._tolerance import RUNS, distance, tolerance

_AGREE = (
    "every module that both name agrees where its value is a result: the difference is "
    "outside of them, or the compiler's"
)
_NONE = "step and reference have no module in common: no name scope is in both"
Values = dict[str, np.ndarray]


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
    """Runs both once more, with values of their modules as further results."""
    own: dict[str, Place] = {}
    places: dict[str, Place] = {}
    want = _values(probed(reference, static, places), arguments)
    got = _values(probed(step, static, own), arguments)
    alike = {key: _alike(key, places, want, own, got) for key in places}
    common = [key for key in places if alike[key]]
    if not common:
        return FirstModule(note=_NONE)
    noise = noisy(reference, static, keeps=True)
    runs = [_values(noise, arguments, seed_of(n), common) for n in range(RUNS)]

    def agrees(key: str, at: Any) -> bool:
        """Whether it is one of the values that the step has there."""
        right = want[key][at]
        drawn = [distance(values[key][at], right) for values in runs]
        allowed = tolerance(drawn, right)
        mine = (value.reshape(want[key].shape)[at] for value in alike[key])
        return any(allowed.ratio(distance(x, right)) <= 1 for x in mine)

    for key, at, told in _in_order(common, places, want):
        if not agrees(key, at):
            place = places[key]
            return FirstModule(f"{place.module}{told}", place.line)
    return FirstModule(note=_AGREE)


def _alike(
    key: str, places: dict[str, Place], want: Values, own: dict[str, Place], got: Values
) -> list[np.ndarray]:
    """The values of a step that may be one of the reference's."""
    of_kind = (k for k, place in own.items() if place.kind == places[key].kind)
    return [got[k] for k in of_kind if _fits(got[k], want[key])]


def probed(fn: Callable, static: Sequence[int | str], places: dict) -> Runner:
    """A runner of a step that also gives values of its modules."""

    def transform(jaxpr, leaves: list, seed):
        del seed
        return run(jaxpr, leaves, Probes(None, True, places=places))

    return Runner(fn, static, transform)


def _values(
    runner: Runner, arguments: Arguments, seed: Any = 0, names: Sequence[str] = ()
) -> Values:
    args, kwargs = copied(arguments)
    seen = runner(args, kwargs, seed).seen
    return {name: on_host(x) for name, x in seen.items() if name in (names or seen)}


def _in_order(
    keys: Sequence[str], places: dict[str, Place], values: Values
) -> Iterator[tuple[str, Any, str]]:
    """(number, index into its value, what to add to its module), as they are computed.

    Forward passes come first; the modules in a scan take turns at each iteration.
    """
    starts: dict[int, int] = {}
    rows = []
    for n, key in enumerate(keys):
        place = places[key]
        backward = place.kind[1]
        direction = " (backward)" if backward else ""
        if place.loop is None:
            rows.append((backward, n, 0, n, key, ..., direction))
            continue
        start, count = starts.setdefault(place.loop, n), len(values[key])
        for i in range(count):
            turn = count - 1 - i if place.reverse else i
            told = f"{direction}, iteration {turn + 1} of {count}"
            rows.append((backward, start, turn, n, key, i, told))
    return ((key, at, told) for *_, key, at, told in sorted(rows, key=lambda r: r[:4]))


def _fits(mine: np.ndarray, other: np.ndarray) -> bool:
    """Whether one is the other, up to loops that run in several parts."""
    same = mine.shape[-1:] == other.shape[-1:] and mine.size == other.size
    return same and mine.dtype == other.dtype
