"""Where a derivative jumps, and whether a function is smooth between its jumps."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxmem._checks import check_float, wrong_type, wrong_value
from jaxmem.ops.few_bit.integrals import integrate, up_to

JUMP = 1e-3  # of the derivative's range: a smaller jump does no harm
MOST = 64  # jumps that are looked for
PARTS = 64  # that a suspect stretch is divided into
NARROW = 1e-15  # of the interval: as near as a jump is found


def name_of(fn: Callable) -> str:
    """A function's name, for messages."""
    return getattr(fn, "__name__", repr(fn))


def as_breaks(breaks: Any, interval: tuple[float, float]) -> tuple[float, ...] | None:
    """Jumps that the user gives, checked; None where they are to be found."""
    if breaks is None:
        return None
    allowed = "None, or numbers inside of the interval that increase"
    if isinstance(breaks, str) or not isinstance(breaks, Sequence | np.ndarray):
        raise wrong_type("breaks", breaks, allowed)
    places = [check_float(f"breaks={breaks}: a jump", b) for b in breaks]
    if any(
        a >= b
        for a, b in zip((interval[0], *places), (*places, interval[1]), strict=True)
    ):
        raise wrong_value("breaks", breaks, allowed)
    return tuple(places)


def find_jumps(
    derivative: Callable, x: np.ndarray, slope: np.ndarray
) -> Sequence[float]:
    """Where the derivative jumps, from samples of it at increasing x."""
    limit = JUMP * np.ptp(slope)
    step = np.abs(np.diff(slope))
    suspect = np.sort(np.argsort(-step)[:MOST])
    suspect = suspect[step[suspect] > limit]
    low, high, step = x[suspect], x[suspect + 1], step[suspect, None]
    rows, i = np.arange(len(suspect)), np.zeros(len(suspect), int)
    # Closer and closer where it changes most between two points.
    while np.max(high - low, initial=0.0) > NARROW * (x[-1] - x[0]):
        inner = np.linspace(low, high, PARTS + 1, axis=-1)
        step = np.abs(np.diff(derivative(inner), axis=-1))
        i = np.argmax(step, axis=-1)
        low, high = inner[rows, i], inner[rows, i + 1]
    jumps = step[rows, i] > limit
    if np.sum(jumps) == MOST:
        raise ValueError(
            f"fn: a derivative with {MOST} jumps or more; fewer are allowed"
        )
    ends = zip(low[jumps], high[jumps], strict=True)
    return sorted({_roundest(a, b) for a, b in ends})


def _roundest(low: float, high: float) -> float:
    """The number of the fewest decimals in a tiny stretch."""
    rounded = (round(high, digits) + 0.0 for digits in range(17))
    return next((float(r) for r in rounded if low <= r <= high), float(high))


def check_breaks(fn: Callable, found: Sequence[float], breaks, width: float) -> None:
    """Raises where the derivative jumps and the user names no jump."""
    for jump in found:
        if not any(abs(jump - b) <= 4 * NARROW * width for b in breaks):
            raise ValueError(
                f"breaks={breaks}: the derivative of {name_of(fn)} jumps at {jump:.6g}"
                " as well; name all of its jumps, or give None to have them found"
            )


def check_continuous(fn: Callable, ends, value, slope, breaks) -> None:
    """Raises unless the derivative integrates to the function between the breaks."""
    parts = np.searchsorted(ends, [ends[0], *breaks, ends[-1]])
    running = integrate(ends, np.stack([slope, np.abs(slope)]))
    sums = np.diff(up_to(running, ends[parts]), axis=1)
    for first, last, got, size in zip(parts[:-1], parts[1:] - 1, *sums, strict=True):
        want = value[last, -1] - value[first, 0]
        if abs(got - want) > 1e-3 * max(size, abs(want)):
            raise ValueError(
                f"{name_of(fn)} is not smooth: it rises by {want:.6g} from "
                f"{ends[first]:.6g} to {ends[last + 1]:.6g}, its derivative integrates "
                f"to {got:.6g}"
            )
