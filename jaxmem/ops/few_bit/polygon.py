"""The piecewise linear function nearest to f, whose slopes are the levels.

Approx-BP (arXiv 2406.16282, section 4) takes as derivative that of a continuous
piecewise linear h which minimises the integral of (f - h)^2. At the ends of the
interval h goes over into the tangents of f. Not optimal: h is the best of its
neighbourhood.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxmem.ops.few_bit.integrals import Integrals, integrate, up_to
from jaxmem.ops.few_bit.steps import (
    CLOSE,
    ROUNDS,
    Sampled,
    Table,
    cheapest_path,
    dense_points,
)

COLUMNS = 97  # of the lattice
HEIGHTS = np.linspace(-1.5, 1.5, 17)  # in it, in the distances of chords from f
LATTICE_PIECES = 16
STEPS = np.linspace(-1, 1, 9)  # of a window, along each of its two sides
CLOSER = 0.5  # a window shrinks by this


class Corners(NamedTuple):
    """Where h bends, and its values there."""

    x: np.ndarray
    h: np.ndarray


class Tangents(NamedTuple):
    """The tangents of f at the two ends of the interval."""

    x: np.ndarray
    h: np.ndarray
    slope: np.ndarray

    def at(self, end: int, x):
        return self.h[end] + self.slope[end] * (x - self.x[end])


def best_polygon(sampled: Sampled, pieces: int) -> Table:
    """The slopes of the continuous piecewise linear function nearest to f."""
    ends = (np.array([0, -1]), np.array([0, -1]))
    tangents = Tangents(*(a[ends] for a in (sampled.x, sampled.value, sampled.slope)))
    searched = _moments(sampled, sampled.searched)
    corners = _corners(sampled, searched, tangents, pieces)
    alone = [
        Corners(*(np.array([c]) for c in corner))
        for corner in zip(*corners, strict=True)
    ]
    costs = _costs(_moments(sampled, sampled.weight), tangents, alone)
    inner = np.diff(corners.h) / np.diff(corners.x)
    levels = np.array([tangents.slope[0], *inner, tangents.slope[1]])
    return Table(corners.x, levels, float(np.sum(costs)))


def _moments(sampled: Sampled, w: np.ndarray) -> Integrals:
    f, x = sampled.value, sampled.x
    moments = [w, w * x, w * x * x, w * f, w * f * x, w * f * f]
    return integrate(sampled.ends, np.stack(moments))


def _corners(sampled, integrals, tangents, pieces: int) -> Corners:
    if pieces == 2:
        return _crossing(tangents)
    if pieces <= LATTICE_PIECES:
        # The best h through points of a coarse lattice round f is a cheapest path.
        start = _on_lattice(sampled, integrals, tangents, pieces)
    else:
        # A lattice would be large: each piece of the table of one bit less is halved.
        half = _corners(sampled, integrals, tangents, pieces // 2)
        start = _halved(sampled, tangents, half)
    return _refined(integrals, tangents, *start)


def _crossing(tangents: Tangents) -> Corners:
    # With two pieces h is its two tangents.
    bend = tangents.slope[1] - tangents.slope[0]
    x = (tangents.at(0, 0.0) - tangents.at(1, 0.0)) / bend if bend else np.nan
    if not tangents.x[0] < x < tangents.x[1]:
        raise ValueError(
            "bits=1: the tangents at the interval's ends do not cross inside of it, "
            "so no continuous function has these two pieces; use 2 bits or more"
        )
    return Corners(np.array([x]), np.array([tangents.at(0, x)]))


def _value(sampled: Sampled, x: np.ndarray) -> np.ndarray:
    return np.interp(x, sampled.x.ravel(), sampled.value.ravel())


def _on_lattice(sampled, integrals, tangents, pieces: int):
    """Corners among the points of a lattice, and windows that reach the next ones."""
    x = dense_points(sampled, COLUMNS + 2, 1 / 5)
    chord = dense_points(sampled, pieces + 1, 1 / 5)
    chords = np.interp(sampled.x, chord, _value(sampled, chord))
    far = np.max(np.abs(chords - sampled.value))
    gap = np.maximum(np.diff(x)[1:], np.diff(x)[:-1])
    x = x[1:-1]
    h = _value(sampled, x)[:, None] + far * HEIGHTS
    points = Corners(np.repeat(x, len(HEIGHTS)), h.ravel())
    first, last = (Corners(x, tangents.at(end, x)) for end in (0, 1))
    layers = [first, *[points] * (pieces - 3), last]
    corners = _cheapest(integrals, tangents, layers)[0]
    return corners, gap[np.searchsorted(x, corners.x)], np.full(pieces - 1, far / 2)


def _halved(sampled: Sampled, tangents: Tangents, corners: Corners):
    """A corner more on f in each piece, and windows up to the next ones."""
    knots = np.array([tangents.x[0], *corners.x, tangents.x[1]])
    middle = (knots[1:] + knots[:-1]) / 2
    x = np.sort([*corners.x, *middle])
    gap = np.diff(x, prepend=knots[0], append=knots[-1])
    h = _value(sampled, x)
    far = np.max(np.abs(corners.h - _value(sampled, corners.x)))
    return Corners(x, h), np.minimum(gap[1:], gap[:-1]), np.full(len(x), far)


def _costs(integrals, tangents, layers: Sequence[Corners]) -> list[np.ndarray]:
    """Of the pieces of h, from each corner of a layer to each of the next."""
    ends = [Corners(tangents.x[e, None], tangents.h[e, None]) for e in (0, 1)]
    whole = [ends[0], *layers, ends[1]]
    return [_cost(integrals, a, b) for a, b in itertools.pairwise(whole)]


def _cost(integrals: Integrals, left: Corners, right: Corners) -> np.ndarray:
    """Of straight lines from corners to corners; infinite where they lead back."""
    width = right.x - left.x[:, None]
    slope = (right.h - left.h[:, None]) / np.where(width > 0, width, 1.0)
    base = left.h[:, None] - slope * left.x[:, None]
    parts = up_to(integrals, right.x)[:, None, :] - up_to(integrals, left.x)[:, :, None]
    one, x, xx, f, fx, ff = parts
    line = slope * slope * xx + 2 * slope * base * x + base * base * one
    square = ff - 2 * (slope * fx + base * f) + line
    return np.where(width > 0, np.maximum(square, 0.0), np.inf)


def _cheapest(integrals, tangents, layers: Sequence[Corners]):
    path = cheapest_path(_costs(integrals, tangents, layers))
    chosen = [(c.x[i], c.h[i]) for c, i in zip(layers, path, strict=True)]
    return Corners(*np.array(chosen).T), np.array(path)


# A few candidates round each corner, closer and closer. (The paper anneals.)
def _refined(integrals, tangents, corners: Corners, wide, high) -> Corners:
    span = tangents.x[1] - tangents.x[0]
    across, along = (a.ravel() for a in np.meshgrid(STEPS, STEPS, indexing="ij"))
    for _ in range(ROUNDS):
        if np.max(wide) < CLOSE * span:
            break
        x = np.clip(corners.x[:, None] + wide[:, None] * across, *tangents.x)
        h = corners.h[:, None] + high[:, None] * along
        for end in (0, -1):
            h[end] = tangents.at(end, x[end])
        corners, path = _cheapest(integrals, tangents, [*map(Corners, x, h)])
        at_edge = [np.abs(steps[path]) == 1 for steps in (across, along)]
        at_edge[1][[0, -1]] = False
        wide = np.where(at_edge[0], wide, CLOSER * wide)
        high = np.where(at_edge[1], high, CLOSER * high)
    return corners
