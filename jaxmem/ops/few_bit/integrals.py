"""Running integrals of sampled functions, up to any point, in float64 numpy.

Functions are sampled at five points (Gauss-Lobatto) in each cell of a fine grid.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CELLS = 8192
INSIDE = 1e-9  # how far inside, in cells, a point at a cell's end lies
NODES = np.array([-1 + INSIDE, -np.sqrt(3 / 7), 0.0, np.sqrt(3 / 7), 1 - INSIDE])
WEIGHTS = np.array([1 / 10, 49 / 90, 32 / 45, 49 / 90, 1 / 10]) / 2


class Integrals(NamedTuple):
    """Running integrals of several functions over the cells between `ends`."""

    ends: np.ndarray
    sums: np.ndarray  # (function, end)
    first: np.ndarray  # (function, cell): the value at the cell's left end
    last: np.ndarray


def in_float64(fn: Callable) -> Callable[[np.ndarray], np.ndarray]:
    """`fn` of each element in float64, whatever precision and trace are around."""
    mapped = jax.jit(jax.vmap(fn))

    def call(x):
        with jax.ensure_compile_time_eval(), jax.enable_x64(True):
            with jax.numpy_dtype_promotion("standard"):
                y = mapped(jnp.asarray(np.ravel(x), jnp.float64))
                return np.asarray(y, np.float64).reshape(np.shape(x))

    return call


def cell_ends(interval: tuple[float, float], breaks: Sequence[float]) -> np.ndarray:
    """The ends of the cells of the fine grid."""
    low, high = interval
    # Each cell sees its own side of a break.
    inner = [b for b in breaks if low < b < high]
    return np.unique([*np.linspace(low, high, CELLS + 1), *inner])


def sample_points(ends: np.ndarray) -> np.ndarray:
    """Where to sample, (cell, point)."""
    middle, half = (ends[1:] + ends[:-1]) / 2, np.diff(ends) / 2
    return middle[:, None] + half[:, None] * NODES


def integrate(ends: np.ndarray, samples: np.ndarray) -> Integrals:
    """The running integrals of functions sampled as (function, cell, point)."""
    sums = np.cumsum((samples @ WEIGHTS) * np.diff(ends), axis=1)
    sums = np.pad(sums, ((0, 0), (1, 0)))
    return Integrals(ends, sums, samples[..., 0], samples[..., -1])


def up_to(integrals: Integrals, x: np.ndarray) -> np.ndarray:
    """The integrals from the first end to each x, function first."""
    ends, sums, first, last = integrals
    # Between the ends of a cell a cubic with the right slopes is right to about 1e-14.
    cell = np.clip(np.searchsorted(ends, x) - 1, 0, len(ends) - 2)
    width = ends[cell + 1] - ends[cell]
    t = (x - ends[cell]) / width
    rise = (sums[:, cell + 1] - sums[:, cell]) * (t * t * (3 - 2 * t))
    bend = t * (1 - t) * width * ((1 - t) * first[:, cell] - t * last[:, cell])
    return sums[:, cell] + rise + bend
