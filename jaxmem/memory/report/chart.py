"""Memory over the compiled schedule as a picture to hover over, in HTML.

It has two views: the buffers by address, as the compiler placed them, and the live
bytes of each module, stacked.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxmem._bytes import format_bytes
from jaxmem.memory.buffers.rows import OTHERS, PlacedBuffer
from jaxmem.memory.report.data import ReportData
from jaxmem.memory.report.plot import layers_of, legend_name, limits_of
from jaxmem.pages.colours import FIXED
from jaxmem.pages.markup import Markup, data, tag

_WIDTH, _HEIGHT = 1000, 400  # of the drawing, which is stretched to its frame
_EDGED = 4  # buffers larger than this in both directions have an edge
_TICKS = 4
_NEAR = 1.4  # limits are lines where they are below this part of the peak


@dataclass(frozen=True)
class Scale:
    """From steps and bytes to the drawing."""

    steps: int  # of the schedule
    bytes: int  # at the top

    @classmethod
    def of(
        cls, reports: Sequence[ReportData], steps: int, budget: int | None
    ) -> "Scale":
        """Bytes that have room for each report, and for limits that are near."""
        tops = [float(report.peak_bytes) for report in reports]
        limits = {n for report in reports for _, n in limits_of(report, budget)}
        tops += [limit for limit in limits if limit < _NEAR * max(tops)]
        return cls(max(steps, 1), math.ceil(1.04 * max(*tops, 1)))

    def x(self, step: float) -> float:
        return round(_WIDTH * step / self.steps, 1)

    def y(self, count: float) -> float:
        return round(_HEIGHT * (1 - count / self.bytes), 2)

    def percent(self, count: float) -> str:
        return f"{100 * count / self.bytes:.2f}%"


@dataclass(frozen=True)
class _Box:
    """A rectangle of the view by address, and what its tooltip says."""

    place: PlacedBuffer
    module: str
    lines: tuple[str, ...]


def chart(
    report: ReportData,
    title: str,
    colours: Mapping[str, str],
    reports: Sequence[ReportData],
    budget: int | None = None,
) -> Markup:
    """The picture of a report, on the scale of all `reports`; a budget is a line."""
    if len(report.timeline) < 2:
        return Markup()
    last = max([report.timeline[-1].index, *(p.end for p in report.placed)])
    scale = Scale.of(reports, last + 1, budget)
    boxes = list(_boxes(report, last + 1))
    layers = layers_of(report)
    both = bool(report.placed)
    numbers = {module: i for i, module in enumerate(colours)}
    drawings = [_layers(report, layers, scale, colours, numbers, hidden=both)]
    if both:
        drawings.insert(0, _addresses(boxes, scale, colours, numbers))
    plot = tag(
        "div",
        *_ticks(scale),
        *drawings,
        *_marks(report, scale),
        *_limits(report, scale, budget),
        tag("div", class_="jm-tip", hidden="", role="status"),
        class_="jm-plot",
    )
    return tag(
        "figure",
        tag("figcaption", title),
        plot,
        tag(
            "div",
            *(tag("span", text) for text in ("0", _ACROSS, last + 1)),
            class_="jm-x",
        ),
        _known(report, boxes, layers, scale),
        class_="jm-chart",
    )


_ACROSS = "step of the compiled schedule (loop bodies once)"


def legend(colours: Mapping[str, str], reports: Sequence[ReportData]) -> Markup:
    """A button for each module that is drawn: it shows that module alone."""
    drawn = {m for report in reports for m in layers_of(report)}
    drawn |= {legend_name(p.module, colours) for r in reports for p in r.placed}
    buttons = [
        tag(
            "button",
            tag("i", style=f"background:{colour}"),
            module,
            type="button",
            data_m=number,
            aria_pressed="false",
        )
        for number, (module, colour) in sorted(
            enumerate(colours.items()), key=lambda item: item[1][0] in FIXED
        )
        if module in drawn and (module in FIXED or colour != FIXED[f"({OTHERS})"])
    ]
    label = "Show one module alone"
    return tag("div", *buttons, class_="jm-legend", role="group", aria_label=label)


def number_of(module: str, colours: Mapping[str, str]) -> int:
    """The number by which a module is filtered."""
    return list(colours).index(legend_name(module, colours))


def views() -> Markup:
    """Two buttons that choose what all pictures of a page show."""
    names = {"address": "buffers by address", "module": "bytes by module"}
    return tag(
        "div",
        *(
            tag(
                "button",
                name,
                type="button",
                data_view=view,
                aria_pressed=str(view == "address").lower(),
            )
            for view, name in names.items()
        ),
        class_="jm-views",
    )


def _boxes(report: ReportData, steps: int) -> Iterator[_Box]:
    """Arguments at the bottom, outputs above them, then the temporaries."""
    # Arguments and outputs have allocations of their own: their order is ours.
    at = 0
    for kind in ("argument", "output"):
        for b in report.at_peak:
            if b.kind == kind:
                span = (b.bytes, at, 0, steps - 1)
                place = PlacedBuffer(*span, b.array, b.what, b.group, "", b.name)
                lines = (b.what, _size(place), kind, "during the whole step")
                yield _Box(place, b.group, lines)
                at += b.bytes
    for p in report.placed:
        lifetime = f"alive from step {p.start} to {p.end} of {steps}"
        lines = (p.what or p.name, _size(p), p.module, _place(p), lifetime, p.name)
        place = PlacedBuffer(
            p.bytes, at + p.offset, p.start, p.end, p.array, "", p.module, "", p.name
        )
        yield _Box(place, p.module, lines)


def _size(place: PlacedBuffer) -> str:
    return f"{format_bytes(place.bytes)}  {place.array}".rstrip()


def _place(place: PlacedBuffer) -> str:
    """The end of the source's path."""
    return "/".join(place.source.replace("\\", "/").split("/")[-2:])


def _addresses(boxes, scale: Scale, colours, numbers) -> Markup:
    shapes = []
    for i, box in enumerate(boxes):
        place, module = box.place, legend_name(box.module, colours)
        left, top = scale.x(place.start), scale.y(place.offset + place.bytes)
        width = round(max(scale.x(place.end + 1) - left, 0.5), 1)
        height = round(max(scale.y(place.offset) - top, 0.3), 2)
        shapes.append(
            tag(
                "rect",
                x=left,
                y=top,
                width=width,
                height=height,
                class_="jm-edge" if min(width, height) > _EDGED else None,
                fill=colours[module],
                data_m=numbers[module],
                data_i=i,
            )
        )
    return _svg(shapes, "address", "buffers by address over the compiled schedule")


def _layers(report, layers, scale: Scale, colours, numbers, hidden: bool) -> Markup:
    """Areas of the modules on top of each other."""
    steps = [step.index for step in report.timeline]
    edges = [*zip(steps, [*steps[1:], scale.steps], strict=True)]
    base = [0] * len(steps)
    shapes = []
    for i, (module, sizes) in enumerate(layers.items()):
        above = [b + n for b, n in zip(base, sizes, strict=True)]
        below = [*_outline(edges, base, scale)]
        outline = [*_outline(edges, above, scale), *reversed(below)]
        shown = legend_name(module, colours)
        points = " ".join(f"{x},{y}" for x, y in outline)
        shapes.append(
            tag(
                "polygon",
                points=points,
                fill=colours[shown],
                data_m=numbers[shown],
                data_layer=i,
                class_="jm-edge",
            )
        )
        base = above
    label = "live bytes by module over the compiled schedule"
    return _svg(shapes, "module", label, hidden="" if hidden else None)


def _outline(edges, heights, scale: Scale) -> Iterator[tuple[float, float]]:
    for (left, right), height in zip(edges, heights, strict=True):
        yield scale.x(left), scale.y(height)
        yield scale.x(right), scale.y(height)


def _svg(shapes: list[Markup], view: str, label: str, hidden: str | None = None):
    return tag(
        "svg",
        *shapes,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
        data_view=view,
        hidden=hidden,
    )


def _ticks(scale: Scale) -> Iterator[Markup]:
    """Lines at round numbers of bytes."""
    unit = 1024.0 ** min(int(math.log(scale.bytes, 1024)), 4)
    rough = scale.bytes / unit / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(n for n in (1, 2, 5, 10) if n * power >= rough)
    count = 0.0
    while count * unit <= scale.bytes:
        at = f"bottom:{scale.percent(count * unit)}"
        if count:
            yield tag("div", class_="jm-grid", style=at)
        yield tag("div", format_bytes(count * unit), class_="jm-tick", style=at)
        count += step


def _marks(report: ReportData, scale: Scale) -> Iterator[Markup]:
    """The peak: its step, and its bytes."""
    across = 100 * (report.peak_step + 0.5) / scale.steps
    label = f"peak {format_bytes(report.peak_bytes)} at step {report.peak_step}"
    late = " jm-late" if across > 50 else ""
    style = f"left:{across:.2f}%"
    yield tag("div", tag("span", label), class_=f"jm-peak{late}", style=style)


def _limits(report: ReportData, scale: Scale, budget: int | None) -> Iterator[Markup]:
    """The chip's memory and the budget, where they are near."""
    for name, limit in limits_of(report, budget):
        if limit <= scale.bytes:
            style = f"bottom:{scale.percent(limit)}"
            text = f"{name}: {format_bytes(limit)}"
            yield tag("div", tag("span", text), class_="jm-limit", style=style)


def _known(report, boxes: Sequence[_Box], layers, scale: Scale) -> Markup:
    """What the tooltips say; texts are numbered, because many are alike."""
    strings: dict[str, int] = {}
    number = lambda text: strings.setdefault(text, len(strings))
    buffers = [[number(line) for line in box.lines] for box in boxes]
    known = {
        "buffers": buffers,
        "strings": list(strings),
        "steps": [[s.index, s.label, s.bytes] for s in report.timeline],
        "layers": list(layers.items()),
        "across": scale.steps,
    }
    return data(known)
