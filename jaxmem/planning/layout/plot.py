"""Draws a layout: one rectangle a buffer, time to the right, bytes upwards."""

from collections.abc import Mapping, Sequence
from os import PathLike

import numpy as np

from jaxmem._bytes import axis_unit
from jaxmem.pages import import_figure
from jaxmem.planning.layout.buffers import Buffer

_EDGES = 2000  # buffers above which outlines would cover the picture


def plot_layout(
    buffers: Sequence[Buffer],
    offsets: Mapping[int | str, int],
    height: int,  # bytes of the arena
    load: int,  # the most bytes alive at once
    path: str | PathLike[str],
) -> None:
    """Writes the picture to `path`."""
    buffers = [b for b in buffers if b.size]
    if not buffers:
        raise ValueError("nothing to draw: no buffer has any bytes")
    figure = import_figure()(figsize=(10, 5.2), layout="constrained")
    from matplotlib import colormaps
    from matplotlib.collections import PolyCollection

    low = np.array([offsets[b.id] for b in buffers], float)
    high = low + [b.size for b in buffers]
    left = np.array([b.lower for b in buffers], float)
    right = np.array([b.upper for b in buffers], float)
    scale, unit = axis_unit(height)
    corners = [(left, low), (left, high), (right, high), (right, low)]
    shapes = np.stack([np.stack([x, y / scale], axis=1) for x, y in corners], axis=1)
    axes = figure.add_subplot()
    width = 0.3 if len(buffers) <= _EDGES else 0.0
    rectangles = PolyCollection([*shapes], linewidths=width, edgecolors="#30343b")
    # Long-lived buffers are dark.
    life = np.log(right - left)
    share = (life - life.min()) / max(np.ptp(life), 1e-9)
    rectangles.set_facecolor(colormaps["viridis"](1 - 0.9 * share))
    axes.add_collection(rectangles)
    axes.axhline(load / scale, color="#d62728", linewidth=1, linestyle="--")
    axes.set(
        xlim=(left.min(), right.max()),
        ylim=(0, height / scale * 1.02),
        xlabel="time",
        ylabel=unit,
        title=f"{len(buffers):,} buffers in {height / scale:,.4g} {unit}; "
        f"alive at once (dashed) {load / scale:,.4g}",
    )
    figure.savefig(path, dpi=150)
