"""What a step waits for one after the other: its kernels in the schedule's order."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from jaxmem.cost.roofline import Bound

_MOST = 400  # spans that are kept


@dataclass(frozen=True)
class TimeSpan:
    """Kernels of one module that run one after the other.

    Attributes:
        seconds: of these in a step; of a loop's body of all iterations together.
        module: the label of their module.
        bound: what they wait for most.
        kernels: how many run.
    """

    seconds: float
    module: str
    bound: Bound
    kernels: int


def spans_of(kernels: Iterable[tuple[str, Bound, float, float]]) -> tuple:
    """Spans of (module, bound, times, seconds of one time), in this order.

    The shortest ones join the span before them where there are too many to draw.
    """
    found: list[tuple[str, dict[Bound, float], list[float]]] = []
    for module, bound, times, seconds in kernels:
        if not found or found[-1][0] != module:
            found.append((module, defaultdict(float), [0.0, 0.0]))
        _, bounds, sums = found[-1]
        bounds[bound] += times * seconds
        sums[0] += times * seconds
        sums[1] += times
    shortest = sorted((sums[0] for *_, sums in found), reverse=True)[_MOST - 1 : _MOST]
    drawn: list[TimeSpan] = []
    for module, bounds, (seconds, times) in found:
        bound = max(bounds, key=lambda bound: bounds[bound])
        one = TimeSpan(seconds, module, bound, int(times))
        if drawn and shortest and seconds < shortest[0]:
            last = drawn[-1]
            whole, count = last.seconds + seconds, last.kernels + one.kernels
            drawn[-1] = TimeSpan(whole, last.module, last.bound, count)
        else:
            drawn.append(one)
    return tuple(drawn)
