"""Draws live bytes over the compiled schedule, stacked by module path."""

import math
from collections import Counter
from os import PathLike
from typing import TYPE_CHECKING, Any

from jaxmem._bytes import format_bytes
from jaxmem._remedies import missing_package
from jaxmem.memory.buffers.rows import OTHERS
from jaxmem.memory.report.text import headline

if TYPE_CHECKING:
    from jaxmem.memory.report.report import MemoryReport

_LAYERS = 10  # with a colour of their own
_THINNEST = 0.002  # of the peak: the smallest layer that is drawn
# Arguments and outputs are always there: they are grey, and coloured is what could be
# saved.
BASE = {"(arguments)": "#b8bec7", "(outputs)": "#d8dce2"}
_REST = {f"({OTHERS})": "#8a8f98"}
_COLOURS = (
    "#4269d0 #efb118 #ff725c #6cc5b0 #3ca951 #ff8ab7 #a463f2 #97bbf5 #9c6b4e #2f8f9d"
).split()


def plot_report(report: "MemoryReport", path: str | PathLike[str]) -> None:
    """Writes the picture to `path`."""
    figure = _import_figure()(figsize=(10, 5.2), layout="constrained")
    draw(figure.add_subplot(), report)
    _legend(figure)
    figure.savefig(path, dpi=150)


def plot_both(
    before: "MemoryReport", after: "MemoryReport", path: str | PathLike[str]
) -> None:
    """Writes a picture of two reports side by side, on one scale of bytes."""
    figure = _import_figure()(figsize=(15, 5.2), layout="constrained")
    both = figure.subplots(1, 2, sharey=True)
    top = max(before.peak_bytes, after.peak_bytes)
    for axes, report in zip(both, (before, after), strict=True):
        draw(axes, report, top)
    both[1].set_ylabel("")
    _legend(figure)
    figure.savefig(path, dpi=150)


def draw(axes: Any, report: "MemoryReport", top: int | None = None) -> None:
    """Draws a report; the unit of the axis is chosen for `top` bytes."""
    if not report.timeline:
        raise ValueError("nothing to draw: the compiler dumped no schedule")
    layers = layers_of(report)
    scale, unit = _axis_unit(top or report.peak_bytes)
    _draw_layers(axes, report, layers, scale)
    _draw_peak(axes, report, scale, unit)
    _label(axes, report, unit)


def layers_of(report: "MemoryReport") -> dict[str, list[int]]:
    """Bytes of each layer of the picture at each step of the timeline."""
    fullest: Counter[str] = Counter()
    for step in report.timeline:
        fullest |= Counter(dict(step.by_module))
    least = _THINNEST * report.peak_bytes
    named = [m for m, n in fullest.most_common() if n >= least]
    coloured = [m for m in named if m not in BASE | _REST][:_LAYERS]
    order = [m for m in BASE if fullest[m] >= least] + coloured
    layers: dict[str, list[int]] = {m: [] for m in order}
    rest = []
    for step in report.timeline:
        sizes = dict(step.by_module)
        for module in order:
            layers[module].append(sizes.pop(module, 0))
        rest.append(sum(sizes.values()))
    return layers | ({f"({OTHERS})": rest} if any(rest) else {})


def _import_figure() -> Any:
    """matplotlib's Figure, without pyplot and its global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_package("drawing", "matplotlib>=3.9") from error
    return Figure


def _draw_layers(axes: Any, report: "MemoryReport", layers, scale: float) -> None:
    colours = iter(_COLOURS * (1 + len(layers) // len(_COLOURS)))
    fixed = BASE | _REST
    steps = [step.index for step in report.timeline]
    axes.stackplot(
        [*steps, steps[-1] + 1],
        [[n / scale for n in [*sizes, sizes[-1]]] for sizes in layers.values()],
        labels=[
            f"{_clipped(m, 40)}  {format_bytes(max(n))}" for m, n in layers.items()
        ],
        colors=[fixed.get(m) or next(colours) for m in layers],
        step="post",
        linewidth=0,
    )


def _draw_peak(axes: Any, report: "MemoryReport", scale: float, unit: str) -> None:
    peak = report.peak_bytes / scale
    axes.axhline(peak, color="#333", linewidth=1, linestyle="--")
    axes.axvline(report.peak_step, color="#333", linewidth=0.8, linestyle=":")
    fullest = next(
        (s for s in report.timeline if s.index == report.peak_step), report.timeline[-1]
    )
    axes.plot([fullest.index], [fullest.bytes / scale], "o", color="#333", ms=4)
    last = report.timeline[-1].index
    left = fullest.index > last / 2
    axes.annotate(
        f"peak {peak:.4g} {unit}  at  {_clipped(fullest.label, 44)}",
        (fullest.index, peak),
        xytext=(-6 if left else 6, 5),
        textcoords="offset points",
        ha="right" if left else "left",
        fontsize=9,
    )
    memory = report.memory_bytes
    if memory and 0.4 < memory / report.peak_bytes < 1.6:
        axes.axhline(memory / scale, color="#c22", linewidth=1.2)
        axes.annotate(
            f"memory of {report.target}",
            (0, memory / scale),
            xytext=(4, -11),
            textcoords="offset points",
            color="#c22",
            fontsize=9,
        )


def _label(axes: Any, report: "MemoryReport", unit: str) -> None:
    axes.set_title(headline(report), loc="left", fontsize=11)
    axes.set_ylabel(unit)
    axes.set_xlabel("step of the compiled schedule (loop bodies once)")
    last = report.timeline[-1].index + 1
    axes.set_xlim(0, max(last, 1))
    axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any) -> None:
    """Draws the legends, in the order of the picture from the top down."""
    several = len(figure.axes) > 1
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        place = {"loc": "upper right"} if several else {"loc": "outside right upper"}
        (axes if several else figure).legend(
            handles[::-1],
            labels[::-1],
            **place,
            frameon=False,
            fontsize=8,
            title="largest modules",
            title_fontsize=9,
            alignment="left",
        )


def _clipped(text: str, width: int) -> str:
    """The end of a text: that of a path says more than its start."""
    return text if len(text) <= width else "…" + text[-(width - 1) :]


def _axis_unit(peak: int) -> tuple[float, str]:
    power = min(max(int(math.log(max(peak, 1), 1024)), 0), 4)
    return 1024.0**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]
