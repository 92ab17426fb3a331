"""The piecewise constant function nearest to a derivative, by dynamic programming.

Few-Bit Backward (Novikov et al., arXiv 2202.00441, section 3) keeps of each input only
the stretch it lies in, and takes one level for the derivative on each stretch.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxmem.ops.few_bit.integrals import (
    Integrals,
    cell_ends,
    in_float64,
    integrate,
    sample_points,
    up_to,
)
from jaxmem.ops.few_bit.jumps import (
    check_breaks,
    check_continuous,
    find_jumps,
    name_of,
)
from jaxmem.ops.few_bit.weight import Weight

COARSE = 1024  # points of the first grid
CANDIDATES = np.linspace(-1, 1, 17)
EDGES = 0, len(CANDIDATES) - 1
CLOSER = 0.25  # the window round a border shrinks by this
CLOSE = 1e-8  # of the interval: where it ends; the error is flat there to 1e-15
ROUNDS = 200
TILT = 1e-7  # of two best tables, one the mirror image of the other, it takes one
FLAT = 1e-12  # a derivative that changes by less is constant


class Table(NamedTuple):
    """A derivative in steps: `levels[i]` holds between `borders[i - 1]` and `[i]`.

    Attributes:
        borders: increasing, one fewer than levels.
        levels: the values of the derivative.
        error: what was minimised: the weighted squared L2 distance.
    """

    borders: np.ndarray
    levels: np.ndarray
    error: float


class Sampled(NamedTuple):
    """A function and its derivative at the points of the fine grid, and the weight."""

    ends: np.ndarray
    x: np.ndarray
    value: np.ndarray
    slope: np.ndarray
    weight: np.ndarray
    searched: np.ndarray  # the weight with a floor and a tilt
    breaks: tuple[float, ...]  # where the derivative jumps


def sample(
    fn: Callable,
    interval: tuple[float, float],
    weight: Weight,
    breaks: Sequence[float] | None = None,
) -> Sampled:
    """Evaluates `fn` and its derivative, with cells that end where that jumps."""
    derivative = in_float64(jax.grad(fn))
    x = sample_points(cell_ends(interval, ())).ravel()
    jumps = find_jumps(derivative, x, derivative(x))
    if breaks is None:
        breaks = jumps
    width = interval[1] - interval[0]
    check_breaks(fn, jumps, breaks, width)
    ends = cell_ends(interval, [*breaks, *weight.breaks])
    x = sample_points(ends)
    value, slope = in_float64(fn)(x), derivative(x)
    bad = ~(np.isfinite(value) & np.isfinite(slope))
    if np.any(bad):
        name = name_of(fn)
        raise ValueError(f"{name} or its derivative is not finite at {x[bad][0]}")
    check_continuous(fn, ends, value, slope, breaks)
    density = weight.density(x)
    tilt = 1 + TILT * (x - ends[0]) / width
    searched = (density + weight.floor / width) * tilt
    return Sampled(ends, x, value, slope, density, searched, tuple(breaks))


def exact_steps(sampled: Sampled, values: int) -> Table | None:
    """The derivative itself, where it has no more than so many values."""
    parts = np.searchsorted(sampled.ends, sampled.breaks)
    stretches = np.split(sampled.slope, parts)
    levels = np.array([s[0, 0] for s in stretches])
    flat = all(np.ptp(s) <= FLAT for s in stretches)
    if not flat or len({*levels.tolist()}) > values:
        return None
    return Table(np.array(sampled.breaks), levels, 0.0)


def cheapest_path(costs: Sequence[np.ndarray]) -> list[int]:
    """A place in each layer; the matrices (1, n), (n, m), ... (k, 1) lie between."""
    total, came_from = np.zeros(1), []
    for cost in costs:
        sums = total[:, None] + cost
        came_from.append(np.argmin(sums, axis=0))
        total = np.min(sums, axis=0)
    path = [0]
    for back in reversed(came_from):
        path.append(int(back[path[-1]]))
    return path[-2:0:-1]


def dense_points(sampled: Sampled, count: int, power: float) -> np.ndarray:
    """Points denser where the derivative changes fast; half of them evenly spaced."""
    width = np.diff(sampled.ends)
    bend = (sampled.slope[:, -1] - sampled.slope[:, 0]) / width
    weight = sampled.searched[:, 2]
    share = (bend**2 * weight) ** power * width
    total = share.sum()
    even = width / width.sum()
    share = even if total == 0 else (share / total + even) / 2
    reached = np.concatenate([[0.0], np.cumsum(share)])
    return np.interp(np.linspace(0, reached[-1], count), reached, sampled.ends)


def best_steps(sampled: Sampled, pieces: int) -> Table:
    """The piecewise constant function nearest to the derivative."""
    integrals = _moments(sampled, sampled.searched)
    grid = np.union1d(dense_points(sampled, COARSE, 1 / 3), sampled.breaks)
    coarse = _coarse(integrals, grid, pieces)
    borders = _refined(integrals, *coarse, sampled.breaks)
    # Beside a jump the error differs by what its own rounding is.
    near = np.full(len(borders), CLOSE * np.ptp(sampled.ends))
    borders = np.append(borders[:, None], _nearest(sampled.breaks, borders, near), 1)[
        :, -1
    ]
    ends = sampled.ends[[0, -1]]
    w, level, _ = np.diff(up_to(integrals, np.array([ends[0], *borders, ends[1]])))
    return Table(borders, level / w, _error(sampled, borders, level / w))


def _moments(sampled: Sampled, weight: np.ndarray) -> Integrals:
    moments = [weight, weight * sampled.slope, weight * sampled.slope**2]
    return integrate(sampled.ends, np.stack(moments))


def _cost(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Of stretches between running integrals; infinite where nothing lies between."""
    # The integral of f'^2 w, less the square of that of f' w over that of w.
    w, first, second = right - left
    safe = np.where(w > 0, w, 1.0)
    return np.where(w > 0, np.maximum(second - first * first / safe, 0.0), np.inf)


def _coarse(integrals: Integrals, grid: np.ndarray, pieces: int):
    """Borders among the points of the grid, and the distance to the next points."""
    # GELU's derivative rises and falls, so the costs lack the monotone structure that
    # divide-and-conquer needs: all pairs, a second for 6 bits and five for 8.
    upto = up_to(integrals, grid)
    cost = _cost(upto[:, :, None], upto[:, None, :])
    costs = [cost[:1, 1:-1], *[cost[1:-1, 1:-1]] * (pieces - 2), cost[1:-1, -1:]]
    path = 1 + np.array(cheapest_path(costs))
    return grid[path], np.maximum(
        grid[path + 1] - grid[path], grid[path] - grid[path - 1]
    )


# Candidates round each border, closer and closer. (The paper descends from random
# starts: some of its tables are half worse than the best.)
def _refined(integrals: Integrals, borders, window, breaks: Sequence[float]):
    low, high = integrals.ends[[0, -1]]
    for _ in range(ROUNDS):
        if np.max(window) < CLOSE * (high - low):
            break
        tried = np.clip(borders[:, None] + window[:, None] * CANDIDATES, low, high)
        tried = np.concatenate([tried, _nearest(breaks, borders, window)], axis=1)
        upto = up_to(integrals, tried)
        ends = up_to(integrals, np.array([low, high]))
        inner = _cost(upto[:, :-1, :, None], upto[:, 1:, None, :])
        first = _cost(ends[:, :1, None], upto[:, 0, None, :])
        last = _cost(upto[:, -1, :, None], ends[:, 1:, None])
        path = cheapest_path([first, *inner, last])
        borders = tried[np.arange(len(borders)), path]
        inside = np.isin(path, EDGES, invert=True)
        window = np.where(inside, CLOSER * window, window)
    return borders


def _nearest(breaks: Sequence[float], borders: np.ndarray, window: np.ndarray):
    """The jump beside each border, if one is in its window; [border, 0 or 1]."""
    if not breaks:
        return np.empty((len(borders), 0))
    away = np.abs(borders[:, None] - np.array(breaks))
    nearest = np.array(breaks)[np.argmin(away, axis=1)]
    return np.where(np.min(away, axis=1) <= window, nearest, borders)[:, None]


def _error(sampled: Sampled, borders: np.ndarray, levels: np.ndarray) -> float:
    """The squared error of any table under the weight alone."""
    integrals = _moments(sampled, sampled.weight)
    ends = np.clip([-np.inf, *borders, np.inf], *sampled.ends[[0, -1]])
    zero, one, two = np.diff(up_to(integrals, ends))
    return float(np.sum(two - 2 * levels * one + levels**2 * zero))
