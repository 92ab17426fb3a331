"""How far a result may be off: what rounding at random does to it, and no more.

Three measures of a difference: its largest element, its root mean square, and its
projection on the result itself, in which a wrong factor adds up and roundings do not.
Each has its own tolerance, from runs of the reference whose operations are off by
roundings at random (`jaxmem.checking._noise`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RUNS = 12
# One more draw after RUNS draws of a normal variable is above their mean by more than
# this times their standard deviation in one case of two million: a prediction interval
# (Hahn and Meeker, Statistical Intervals, 1991, section 4.7), Student's t with RUNS - 1
# degrees of freedom, times sqrt(1 + 1 / RUNS). A check takes hundreds of measures.
_INTERVAL = 10.1
MEASURES = ("largest", "rms", "along")


@dataclass(frozen=True)
class Distance:
    """How far two arrays are apart.

    Attributes:
      largest: the largest difference of two elements.
      rms: the root mean square of all.
      along: the length of the difference's projection on the reference.
      apart: the elements of which one array alone has NaN, or another infinity.
      nans: the elements that are NaN in both.
    """

    largest: float
    rms: float
    along: float
    apart: int = 0
    nans: int = 0


def distance(got: np.ndarray, want: np.ndarray) -> Distance:
    """How far an array is from the reference."""
    a, b = _wide(got), _wide(want)
    finite = np.isfinite(a) & np.isfinite(b)
    nans = np.isnan(a) & np.isnan(b)
    with np.errstate(invalid="ignore"):
        apart = int(np.sum(~finite & ~nans & ~(a == b)))
    a, b = (np.where(finite, x, 0).ravel() for x in (a, b))
    d = np.abs(a - b)
    length = math.sqrt(float(np.vdot(b, b).real))
    along = abs(np.vdot(b, a - b)) / length if length else 0.0
    rms = math.sqrt(float(np.mean(d * d))) if d.size else 0.0
    largest = float(d.max(initial=0))
    return Distance(largest, rms, float(along), apart, int(nans.sum()))


@dataclass(frozen=True)
class Tolerance:
    """What each measure may be."""

    largest: float
    rms: float
    along: float

    def ratio(self, found: Distance) -> float:
        """The largest share that a measure has of its tolerance; up to 1 passes."""
        if found.apart:
            return math.inf
        return max(self._share(found, name) for name in MEASURES)

    def _share(self, found: Distance, name: str) -> float:
        value, allowed = getattr(found, name), getattr(self, name)
        if value == 0:
            return 0.0
        return value / allowed if allowed else math.inf


def tolerance(noise: Sequence[Distance], want: np.ndarray) -> Tolerance:
    """From the distances of runs with noise, and a rounding of the result itself."""
    least = _roundoff(want)
    return Tolerance(
        *(max(_interval([getattr(d, name) for d in noise]), least) for name in MEASURES)
    )


def _interval(drawn: Sequence[float]) -> float:
    """What a measure may be, of what it is in the runs with noise."""
    # Step and reference are off by as much as a run is, each, in opposite ways; and the
    # step may round twice where the reference rounds once.
    mean = sum(drawn) / len(drawn)
    spread = sum((x - mean) ** 2 for x in drawn) / (len(drawn) - 1)
    return 4 * mean + _INTERVAL * math.sqrt(spread)


def _roundoff(want: np.ndarray) -> float:
    """Two units in the last place of the largest element, in the result's dtype."""
    eps = _eps(want.dtype)
    values = np.abs(_wide(want))
    return 2 * eps * float(values[np.isfinite(values)].max(initial=0)) if eps else 0.0


def _eps(dtype: np.dtype) -> float:
    import jax.numpy as jnp

    inexact = jnp.issubdtype(dtype, jnp.inexact)
    return float(jnp.finfo(dtype).eps) if inexact else 0.0


def _wide(x: np.ndarray) -> np.ndarray:
    """In float64, in which sums over large arrays lose nothing that counts."""
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
