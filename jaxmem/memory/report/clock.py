"""What the milliseconds go to, in HTML: a strip to hover over, and tables."""

from collections.abc import Iterator, Mapping

from jaxmem.memory.report.plot import legend_name
from jaxmem.memory.time.result import HEAD, StepTime, cells, milliseconds, time_line
from jaxmem.pages import page
from jaxmem.pages.markup import Markup, tag, together

_WIDTH, _HEIGHT = 1000, 60  # of the drawing, which is stretched to its frame
_ROWS = 30  # of the slowest operations


def clock(time: StepTime | None, colours: Mapping[str, str]) -> Markup:
    """The predicted time of a step; nothing for a chip without rates.

    Args:
      time: of the report.
      colours: of the modules, those of the picture of the memory.
    """
    if time is None or not time.seconds:
        return Markup()
    rows = [cells(row, time) for row in time.operations[:_ROWS]]
    modules = [
        (milliseconds(seconds), f"{100 * seconds / time.seconds:.1f} %", module)
        for module, seconds in time.by_module
    ]
    return together(
        tag("h3", "What the milliseconds go to"),
        tag("p", time_line(time), class_="jm-faint"),
        _strip(time, colours),
        _folded("By module", page.table((), modules, numbers=[0, 1])),
        _folded("The slowest operations", page.table(HEAD, rows, numbers=[0, 1, 2])),
        page.lines("Notes on the time", time.notes),
    )


def _folded(title: str, table: Markup) -> Markup:
    return tag("details", tag("summary", title), table)


def _strip(time: StepTime, colours: Mapping[str, str]) -> Markup:
    drawing = tag(
        "svg",
        *_rectangles(time, colours),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label="predicted time of the step, by module, in its order",
        style=f"width:100%;height:{_HEIGHT}px",
    )
    ends = (tag("span", text) for text in ("0", _ACROSS, milliseconds(time.seconds)))
    return tag("figure", drawing, tag("div", *ends, class_="jm-x"), class_="jm-clock")


_ACROSS = "predicted time of a step (a loop's body once, as long as all its iterations)"


def _rectangles(time: StepTime, colours: Mapping[str, str]) -> Iterator[Markup]:
    at, scale = 0.0, _WIDTH / time.seconds
    for span in time.spans:
        share = f"{100 * span.seconds / time.seconds:.1f} %"
        what = f"{span.kernels} kernels wait for {span.bound} most"
        told = f"{span.module}: {milliseconds(span.seconds)}, {share}; {what}"
        yield tag(
            "rect",
            tag("title", told),
            x=round(at * scale, 2),
            y=0,
            width=round(span.seconds * scale, 2),
            height=_HEIGHT,
            fill=colours[legend_name(span.module, colours)],
        )
        at += span.seconds
