"""Between two candidates: as few layers as will do take the one of fewer bytes."""

import math
from collections.abc import Callable

from jaxmem.scheduling._searched import Between, Candidate
from jaxmem.scheduling.search.asks import Search

_TRIES = 4  # compiles for the number of layers: peaks are all but linear in it
# Of the slack: it is tried in more layers for less than other candidates, since what is
# expected of them lies between two that were compiled.
_FINER = 0.5


def in_few_layers(
    between: Between,
    peaks: tuple[float, float],
    budget: int,
    slack: float,
    peak_of: Callable[[Candidate, float], Search[float]],
) -> Search[None]:
    """Tries as few layers as will do.

    Args:
      between: the two candidates.
      peaks: expected where no layer takes fewer bytes, and known where all do.
      budget: bytes.
      slack: seconds that are not worth another compile.
      peak_of: asks for the peak of a candidate, of which one is expected.
    """
    few, most = (0, peaks[0]), (between.layers, peaks[1])
    for _ in range(_TRIES):
        layers = _fewest(few, most, budget)
        gain = (most[0] - few[0] - 1) / between.layers * between.gain
        if layers is None or gain <= _FINER * slack:
            return
        peak = yield from peak_of(between.first(layers), _line(few, most, layers))
        if few[0] == 0 and peak == few[1] > budget:
            return  # at their rate they recompute nothing that others do not
        if peak > budget:
            few = layers, peak
        else:
            most = layers, peak


End = tuple[int, float]  # a number of layers, and the peak


def _fewest(few: End, most: End, budget: int) -> int | None:
    """The least number of layers that should do; None where there is none left."""
    for layers in range(few[0] + 1, most[0]):
        if _line(few, most, layers) <= budget:
            return layers
    return most[0] - 1 if few[0] + 1 < most[0] else None


def _line(few: End, most: End, layers: int) -> float:
    if not math.isfinite(few[1]):
        few = few[0], 2 * most[1]
    share = (layers - few[0]) / (most[0] - few[0])
    return few[1] + share * (most[1] - few[1])
