"""Draws live bytes over the compiled schedule, stacked by module path."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

from jaxmem._bytes import axis_unit, format_bytes
from jaxmem.memory.buffers.rows import OTHERS
from jaxmem.memory.report.data import ReportData, fits_its_chip
from jaxmem.pages import import_figure
from jaxmem.pages.colours import FIXED, colours_of

_LAYERS = 10  # with a colour of their own
_LINE = 190  # characters of a line below two pictures
_THINNEST = 0.002  # of the peak: the smallest layer that is drawn
_BASE = ("(arguments)", "(outputs)")  # always there: the lowest layers


def plot_report(report: ReportData, path: str | PathLike[str]) -> None:
    """Writes the picture to `path`."""
    _plot([report], ["live bytes"], path)


def plot_both(
    before: ReportData,
    after: ReportData,
    path: str | PathLike[str],
    below: Sequence[str] = (),
    budget: int | None = None,
) -> None:
    """Writes a picture of two reports side by side, on one scale of bytes.

    A module has the same colour in both. `below`: lines of text. `budget`: bytes that
    a line marks.
    """
    _plot([before, after], ["before", "after"], path, below, budget)


def _plot(
    reports: Sequence[ReportData],
    titles: Sequence[str],
    path: str | PathLike[str],
    below: Sequence[str] = (),
    budget: int | None = None,
) -> None:
    if not all(report.timeline for report in reports):
        raise ValueError("nothing to draw: the compiler dumped no schedule")
    width = 7.5 * len(reports) + 2.5
    figure = import_figure()(figsize=(width, 5.2), layout="constrained")
    several = figure.subplots(1, len(reports), sharey=True, squeeze=False)[0]
    scale, unit = axis_unit(max(report.peak_bytes for report in reports))
    colours = colours_of_reports(reports)
    for axes, report, title in zip(several, reports, titles, strict=True):
        _draw_layers(axes, report, colours, scale)
        _draw_peak(axes, report, scale)
        _draw_limits(axes, report, scale, budget)
        _label(axes, report, title)
    top = max(axes.get_ylim()[1] for axes in several)
    several[0].set_ylim(0, top * 1.06)
    several[0].set_ylabel(unit)
    _legend(figure, colours)
    if below:
        text = "\n".join(_clipped(line, _LINE) for line in below)
        figure.supxlabel(text, x=0.02, ha="left", fontsize=8)
    figure.savefig(path, dpi=150)


def colours_of_reports(reports: Iterable[ReportData]) -> dict[str, str]:
    """Module -> colour, the modules that take most in any of the reports first."""
    fullest: Counter[str] = Counter()
    for report in reports:
        fullest |= Counter({m: max(sizes) for m, sizes in layers_of(report).items()})
    order = sorted(fullest.items(), key=lambda item: (-item[1], item[0]))
    return colours_of(module for module, _ in order)


def layers_of(report: ReportData) -> dict[str, list[int]]:
    """Bytes of each layer of the picture at each step of the timeline."""
    fullest: Counter[str] = Counter()
    for step in report.timeline:
        fullest |= Counter(dict(step.by_module))
    least = _THINNEST * report.peak_bytes
    named = [m for m, n in fullest.most_common() if n >= least]
    coloured = [m for m in named if m not in FIXED][:_LAYERS]
    order = [m for m in _BASE if fullest[m] >= least] + coloured
    layers: dict[str, list[int]] = {m: [] for m in order}
    rest = []
    for step in report.timeline:
        sizes = dict(step.by_module)
        for module in order:
            layers[module].append(sizes.pop(module, 0))
        rest.append(sum(sizes.values()))
    return layers | ({f"({OTHERS})": rest} if any(rest) else {})


def limits_of(report: ReportData, budget: int | None) -> list[tuple[str, int]]:
    """(name, bytes) of the chip's memory and of the budget, which are lines."""
    limits = {f"memory of {report.target}": report.memory_bytes, "budget": budget}
    return [(name, limit) for name, limit in limits.items() if limit]


def legend_name(module: str, colours: Mapping[str, str]) -> str:
    """The module, or the others where it has no colour of its own."""
    others = f"({OTHERS})"
    own = module in FIXED or colours.get(module, FIXED[others]) != FIXED[others]
    return module if own else others


def _draw_layers(
    axes: Any, report: ReportData, colours: dict[str, str], scale: float
) -> None:
    layers = layers_of(report)
    steps = [step.index for step in report.timeline]
    axes.stackplot(
        [*steps, steps[-1] + 1],
        [[n / scale for n in [*sizes, sizes[-1]]] for sizes in layers.values()],
        labels=list(layers),
        colors=[colours[m] for m in layers],
        step="post",
        linewidth=0,
    )


def _draw_peak(axes: Any, report: ReportData, scale: float) -> None:
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
        f"peak {format_bytes(report.peak_bytes)}  at  {_clipped(fullest.label, 44)}",
        (fullest.index, peak),
        xytext=(-6 if left else 6, 5),
        textcoords="offset points",
        ha="right" if left else "left",
        fontsize=9,
    )


def _draw_limits(
    axes: Any, report: ReportData, scale: float, budget: int | None
) -> None:
    for name, limit in limits_of(report, budget):
        if name != "budget" and not 0.4 < limit / report.peak_bytes < 1.6:
            continue
        axes.axhline(limit / scale, color="#c22", linewidth=1.2)
        axes.annotate(
            f"{name}: {format_bytes(limit)}",
            (0, limit / scale),
            xytext=(4, -11),
            textcoords="offset points",
            color="#c22",
            fontsize=9,
        )


def _label(axes: Any, report: ReportData, title: str) -> None:
    text = f"{report.name} on {report.target}, {title}: {_peak(report)}"
    axes.set_title(text, loc="left", fontsize=11)
    axes.set_xlabel("step of the compiled schedule (loop bodies once)")
    last = report.timeline[-1].index + 1
    axes.set_xlim(0, max(last, 1))
    axes.spines[["top", "right"]].set_visible(False)


def _peak(report: ReportData) -> str:
    peak = f"peak {format_bytes(report.peak_bytes)}"
    if report.memory_bytes is None:
        return peak
    return f"{peak}, {'fits' if fits_its_chip(report) else 'does not fit'}"


def _legend(figure: Any, colours: dict[str, str]) -> None:
    """Draws one legend beside the pictures, from the top down."""
    from matplotlib.patches import Patch

    drawn = (axes.get_legend_handles_labels()[1] for axes in figure.axes)
    shown = {legend_name(m, colours) for labels in drawn for m in labels}
    order = {m: i for i, m in enumerate(colours)}
    labels = sorted(shown, key=lambda m: (m in FIXED, order[m]))
    figure.legend(
        [Patch(color=colours[m]) for m in labels],
        [_clipped(m, 40) for m in labels],
        loc="outside right upper",
        frameon=False,
        fontsize=8,
        title="largest modules",
        title_fontsize=9,
        alignment="left",
    )


def _clipped(text: str, width: int) -> str:
    """The end of a text: that of a path says more than its start."""
    return text if len(text) <= width else "…" + text[-(width - 1) :]
