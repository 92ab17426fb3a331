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
from jaxmem.ops.few_bit.weight import Weight

COARSE = 1024  # points of the first grid
CANDIDATES = np.linspace(-1, 1, 17)
CLOSER = 0.25  # the window round a border shrinks by this
CLOSE = 1e-8  # of the interval: where it ends; the error is flat there to 1e-15
ROUNDS = 200
TILT = 1e-7  # of two best tables, one the mirror image of the other, it takes one
JUMP = 1e-3  # of the derivative's range: a smaller jump does no harm


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


def sample(
    fn: Callable, interval: tuple[float, float], weight: Weight, breaks: Sequence[float]
) -> Sampled:
    """Evaluates `fn` and its derivative; refuses what is not smooth between breaks."""
    ends = cell_ends(interval, [*breaks, *weight.breaks])
    x = sample_points(ends)
    derivative = in_float64(jax.grad(fn))
    value, slope = in_float64(fn)(x), derivative(x)
    bad = ~(np.isfinite(value) & np.isfinite(slope))
    if np.any(bad):
        raise ValueError(f"{_name(fn)} or its derivative is not finite at {x[bad][0]}")
    _check_smooth(fn, derivative, x, slope, breaks)
    _check_continuous(fn, ends, value, slope)
    width = ends[-1] - ends[0]
    density = weight.density(x)
    tilt = 1 + TILT * (x - ends[0]) / width
    searched = (density + weight.floor / width) * tilt
    return Sampled(ends, x, value, slope, density, searched)


def _name(fn: Callable) -> str:
    return getattr(fn, "__name__", repr(fn))


def _check_smooth(fn, derivative, x, slope, breaks) -> None:
    # Looks closer and closer where the derivative changes most between two points.
    x, slope = x.ravel(), slope.ravel()
    limit = JUMP * np.ptp(slope)
    for _ in range(5):
        step = np.abs(np.diff(slope))
        for jump in breaks:
            step[(x[:-1] <= jump) & (jump <= x[1:])] = 0
        i = int(np.argmax(step))
        if step[i] <= limit:
            return
        x = np.linspace(x[i], x[i + 1], 65)
        slope = derivative(x)
    raise ValueError(
        f"{_name(fn)} is not smooth: its derivative jumps by {np.ptp(slope):.6g} at "
        f"{x[0]:.6g}; give fewbit a table of your own, with a border there"
    )


def _check_continuous(fn, ends, value, slope) -> None:
    # The derivative must integrate to the function.
    got = up_to(integrate(ends, np.stack([slope, np.abs(slope)])), ends[-1:])[:, 0]
    want = value[-1, -1] - value[0, 0]
    if abs(got[0] - want) > 1e-3 * max(got[1], abs(want)):
        raise ValueError(
            f"{_name(fn)} is not smooth: it rises by {want:.6g} over the interval, "
            f"its derivative integrates to {got[0]:.6g}"
        )


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
    grid = dense_points(sampled, COARSE, 1 / 3)
    borders = _refined(integrals, *_coarse(integrals, grid, pieces))
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
def _refined(integrals: Integrals, borders: np.ndarray, window: np.ndarray):
    low, high = integrals.ends[[0, -1]]
    for _ in range(ROUNDS):
        if np.max(window) < CLOSE * (high - low):
            break
        tried = np.clip(borders[:, None] + window[:, None] * CANDIDATES, low, high)
        upto = up_to(integrals, tried)
        ends = up_to(integrals, np.array([low, high]))
        inner = _cost(upto[:, :-1, :, None], upto[:, 1:, None, :])
        first = _cost(ends[:, :1, None], upto[:, 0, None, :])
        last = _cost(upto[:, -1, :, None], ends[:, 1:, None])
        path = cheapest_path([first, *inner, last])
        borders = tried[np.arange(len(borders)), path]
        inside = np.isin(path, (0, len(CANDIDATES) - 1), invert=True)
        window = np.where(inside, CLOSER * window, window)
    return borders


def _error(sampled: Sampled, borders: np.ndarray, levels: np.ndarray) -> float:
    """The squared error of any table under the weight alone."""
    integrals = _moments(sampled, sampled.weight)
    ends = np.clip([-np.inf, *borders, np.inf], *sampled.ends[[0, -1]])
    zero, one, two = np.diff(up_to(integrals, ends))
    return float(np.sum(two - 2 * levels * one + levels**2 * zero))
