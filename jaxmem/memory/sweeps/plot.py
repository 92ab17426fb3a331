"""Draws a sweep: bytes and predicted milliseconds over one of its names."""

from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from typing import Any

from jaxmem._bytes import axis_unit
from jaxmem.memory.sweeps.swept_step import SweptStep
from jaxmem.pages import import_figure


def plot_sweep(
    names: Sequence[str], steps: Sequence[SweptStep], path: str | PathLike[str]
) -> None:
    """Writes the picture of the steps, whose sizes have these names, to `path`."""
    peaks = [s.peak_bytes for s in steps if s.peak_bytes is not None]
    if not peaks:
        raise ValueError("nothing to draw: no step could be compiled")
    scale, unit = axis_unit(max(peaks))
    panels: list[tuple[str, Callable[[SweptStep], float | None]]] = [
        (f"peak, {unit}", lambda s: _over(s.peak_bytes, scale))
    ]
    if any(step.seconds is not None for step in steps):
        panels.append(("predicted ms", lambda s: _over(s.seconds, 1e-3)))
    figure = import_figure()(figsize=(6.0 * len(panels), 4.6), layout="constrained")
    several = figure.subplots(1, len(panels), squeeze=False)[0]
    name = _along(names, steps)
    for axes, (title, value) in zip(several, panels, strict=True):
        for label, own in _lines(steps, name):
            known = [s for s in own if value(s) is not None]
            points = [s.sizes[name] for s in known], [value(s) for s in known]
            axes.plot(*points, marker="o", label=label)
        axes.set(xlabel=name, ylabel=title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    _draw_memory(several[0], steps, scale)
    if len(several[0].get_legend_handles_labels()[1]) > 1:
        several[0].legend(fontsize=8)
    figure.savefig(path, dpi=150)


def _over(amount: float | None, unit: float) -> float | None:
    return None if amount is None else amount / unit


def _along(names: Sequence[str], steps: Sequence[SweptStep]) -> str:
    """The first name with several values."""
    values = {name: {str(step.sizes[name]) for step in steps} for name in names}
    return next((name for name in names if len(values[name]) > 1), names[0])


def _lines(
    steps: Iterable[SweptStep], name: str
) -> Iterable[tuple[str, list[SweptStep]]]:
    """What all but one name and the chip are -> the steps that have it in common."""
    found: dict[str, list[SweptStep]] = {}
    for step in steps:
        rest = [f"{k}={v}" for k, v in step.sizes.items() if k != name]
        found.setdefault(", ".join([*rest, step.target]), []).append(step)
    return found.items()


def _draw_memory(axes: Any, steps: Iterable[SweptStep], scale: float) -> None:
    """A line at the memory of each chip that the picture comes near to."""
    top = axes.get_ylim()[1]
    known = {s.target: s.memory_bytes for s in steps if s.memory_bytes is not None}
    for chip, memory in known.items():
        if memory / scale <= 1.5 * top:
            axes.axhline(memory / scale, linestyle=":", color="0.4")
            axes.annotate(f"memory of {chip}", (0, memory / scale), fontsize=8)
