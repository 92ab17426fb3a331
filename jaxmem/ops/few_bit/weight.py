"""Where the inputs of a function lie: the weight under which a table is best."""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxmem._checks import wrong_type, wrong_value

FLOOR = 1e-6  # of the mass is spread evenly, so that no stretch weighs nothing
BINS = 512
STRAY = 1e-3  # a smaller share outside of the interval is no reason to warn


class Weight(NamedTuple):
    """A density on the interval, where it jumps, and its share outside of it."""

    density: Callable[[np.ndarray], np.ndarray]
    breaks: tuple[float, ...] = ()
    outside: float = 0.0
    floor: float = FLOOR


def as_weight(weight: Any, interval: tuple[float, float]) -> Weight:
    """ "uniform", "normal", a (counts, edges) histogram, or an array of samples."""
    allowed = (
        '"uniform", "normal", a (counts, edges) histogram or an array of inputs, '
        "finite and not empty"
    )
    if isinstance(weight, str):
        if weight == "uniform":
            return Weight(np.ones_like, floor=0.0)
        if weight == "normal":
            return _warned(_normal(interval), interval)
        raise wrong_value("weight", weight, allowed)
    if isinstance(weight, tuple):
        return _warned(_histogram(*_counts_and_edges(weight), interval), interval)
    try:
        samples = np.asarray(weight, np.float64).ravel()
    except (TypeError, ValueError):
        raise wrong_type("weight", weight, allowed) from None
    if not samples.size or not np.all(np.isfinite(samples)):
        raise wrong_value("weight", weight, allowed)
    return _warned(_samples(samples, interval), interval)


def _warned(weight: Weight, interval: tuple[float, float]) -> Weight:
    if not weight.outside < 1:
        raise ValueError(f"weight has nothing inside of interval={interval}")
    if weight.outside > STRAY:
        warnings.warn(
            f"{weight.outside:.1%} of the weight lies outside of interval={interval}; "
            "there the table's first and last level hold",
            stacklevel=4,
        )
    return weight


def _normal(interval: tuple[float, float]) -> Weight:
    below, above = (0.5 * math.erfc(-x / math.sqrt(2)) for x in interval)
    density = lambda x: np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return Weight(density, outside=1 - (above - below))


def _samples(x: np.ndarray, interval: tuple[float, float]) -> Weight:
    inside = x[(x >= interval[0]) & (x <= interval[1])]
    counts, edges = np.histogram(inside, BINS, interval)
    density = _histogram(counts / x.size, edges, interval)
    return density._replace(outside=1 - inside.size / x.size)


def _counts_and_edges(weight: tuple) -> tuple[np.ndarray, np.ndarray]:
    if len(weight) != 2:
        raise wrong_value("weight", weight, "a histogram is (counts, edges)")
    counts, edges = (np.asarray(part, np.float64) for part in weight)
    if counts.ndim != 1 or edges.shape != (counts.size + 1,) or not counts.size:
        raise ValueError(
            "weight: a histogram has one edge more than counts, got shapes "
            f"{counts.shape} and {edges.shape}"
        )
    if not (np.all(np.isfinite(edges)) and np.all(np.diff(edges) > 0)):
        raise ValueError("weight: the edges of a histogram must be finite and increase")
    if not (np.all(np.isfinite(counts)) and np.all(counts >= 0) and np.any(counts)):
        raise ValueError(
            "weight: the counts of a histogram must be finite, >= 0, not 0"
        )
    return counts / counts.sum(), edges


def _histogram(counts, edges, interval: tuple[float, float]) -> Weight:
    heights = counts / np.diff(edges)

    def density(x):
        bin = np.searchsorted(edges, x, side="right") - 1
        inside = (bin >= 0) & (bin < len(heights))
        return np.where(inside, heights[np.clip(bin, 0, len(heights) - 1)], 0.0)

    covered = np.clip(edges, *interval)
    return Weight(density, tuple(edges), float(1 - heights @ np.diff(covered)))
