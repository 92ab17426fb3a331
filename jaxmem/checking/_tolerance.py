"""How far a result may be off: what rounding at random does to it, and no more.

Three measures of a difference: its largest element, its root mean square, and its
projection on the result itself, in which a wrong factor adds up and roundings do not.
Each has its own tolerance, from runs of the reference whose operations are off by
roundings at random (`jaxmem.checking._noise`), and where that is in doubt of the step.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RUNS = 12
# One more draw after RUNS draws of a normal variable is above their mean by more than
# this times their standard deviation in one case of two million: a prediction interval
# (Hahn and Meeker, Statistical Intervals, 1991, section 4.7), Student's t with RUNS - 1
# degrees of freedom, times sqrt(1 + 1 / RUNS). A check takes hundreds of measures.
_INTERVAL = 10.1
MEASURES = ("largest", "rms", "along")
# A step may round so many times more than its reference. It is chosen: three bits,
# where float16 has thirteen less than float32, so a step in narrower floats is found.
MOST_ROUNDING = 8.0


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


_PIECE = 2**16  # elements that are compared at once: large arrays stay in the cache


def distance(got: np.ndarray, want: np.ndarray) -> Distance:
    """How far an array is from the reference."""
    pairs = zip(_pieces(got), _pieces(want), strict=True)
    sums = [_sums(a, b) for a, b in pairs]
    if not sums:
        return Distance(0.0, 0.0, 0.0)
    largest = max(one[0] for one in sums)
    square, product, own, apart, nans = np.sum([one[1:] for one in sums], axis=0)
    along = float(abs(product) / math.sqrt(own.real)) if own else 0.0
    rms = math.sqrt(square.real / got.size)
    return Distance(largest, rms, along, int(apart.real), int(nans.real))


def _sums(got: np.ndarray, want: np.ndarray) -> tuple[Any, ...]:
    """(largest, sum of squares, product with the reference, its square, ...)."""
    a, b = _wide(got), _wide(want)
    apart = nans = 0
    finite = np.isfinite(a) & np.isfinite(b)
    if not finite.all():
        both = np.isnan(a) & np.isnan(b)
        apart, nans = int(np.sum(~finite & ~both & (a != b))), int(both.sum())
        a, b = np.where(finite, a, 0), np.where(finite, b, 0)
    d = a - b
    size = np.abs(d)
    square, own = np.sum(size * size), np.sum(np.abs(b) ** 2)
    return float(size.max()), square, np.sum(b.conj() * d), own, apart, nans


def _pieces(x: np.ndarray) -> Iterator[np.ndarray]:
    flat = x.ravel()
    return (flat[i : i + _PIECE] for i in range(0, flat.size, _PIECE))


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

    def times(self, step: "Tolerance", found: Distance) -> float:
        """How many times it the step's is, in the measure that is off the most."""
        name = max(MEASURES, key=lambda name: self._share(found, name))
        own, other = getattr(self, name), getattr(step, name)
        return other / own if own else math.inf if other else 1.0

    def with_step(self, step: "Tolerance") -> "Tolerance":
        """Half of it, and half of that of the step's own runs: no less than it is.

        The step and the reference are each off by what rounding does to them, and half
        of a tolerance is for each.
        """
        pairs = ((getattr(self, name), getattr(step, name)) for name in MEASURES)
        return Tolerance(*(_half_of_each(*pair) for pair in pairs))

    def _share(self, found: Distance, name: str) -> float:
        value, allowed = getattr(found, name), getattr(self, name)
        if value == 0:
            return 0.0
        return value / allowed if allowed else math.inf


def _half_of_each(reference: float, step: float) -> float:
    return (reference + min(max(step, reference), MOST_ROUNDING * reference)) / 2


# a share of the reference's tolerance that no roundings of the step account for
OUT_OF_DOUBT = _half_of_each(1.0, math.inf)


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
    if not eps:
        return 0.0
    tops = (np.abs(_wide(x)) for x in _pieces(want))
    return 2 * eps * max((_finite_top(x) for x in tops), default=0.0)


def _finite_top(x: np.ndarray) -> float:
    return float(x[np.isfinite(x)].max(initial=0))


def _eps(dtype: np.dtype) -> float:
    import jax.numpy as jnp

    inexact = jnp.issubdtype(dtype, jnp.inexact)
    return float(jnp.finfo(dtype).eps) if inexact else 0.0


def _wide(x: np.ndarray) -> np.ndarray:
    """In float64, in which sums over large arrays lose nothing that counts."""
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
