"""Pictures of the docs: one look, on a light page and on a dark one."""

import contextlib
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

IMAGES = pathlib.Path(__file__).parent.parent / "docs" / "images"
OURS, THEIRS, TEXT = "#2f8f9d", "#e2725b", "#767676"  # `TEXT` is read on both pages
GREY, DARK = "#c3c9d2", "#27303d"  # an area, and what is written on it
_COLOURED = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor")
_COLOURED += ("xtick.color", "ytick.color")
_LOOK = {
    "svg.hashsalt": "jaxmem",  # the same rows give the same file
    "svg.fonttype": "path",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}
Points = Sequence[tuple[float, float]]


@contextlib.contextmanager
def picture(
    path: pathlib.Path, size: tuple[float, float], font: float = 10
) -> Iterator[Any]:
    """A matplotlib figure of some inches, which is written to an SVG file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({**_LOOK, **dict.fromkeys(_COLOURED, TEXT), "font.size": font}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None}, transparent=True)


def frontier(
    path: pathlib.Path, title: str, ours: Points, theirs: Mapping[str, tuple]
) -> None:
    """Predicted time over bytes: `schedule` as a line, each policy a point by name."""
    with picture(path, (5.4, 3.9), font=9) as figure:
        _frontier(figure.subplots(), title, ours, theirs)


def of_model(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Where the picture of a model lies: letters and digits of its name."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return folder / f"{'-'.join(words)}.svg"


def _frontier(axes, title: str, ours: Points, theirs: Mapping[str, tuple]) -> None:
    from adjustText import adjust_text

    line = sorted(set(ours))
    axes.plot(*zip(*line, strict=True), "-o", color=OURS, markersize=3)
    axes.plot(*zip(*theirs.values(), strict=True), "x", color=THEIRS)
    axes.set(title=title, xlabel="MiB of temporaries", ylabel="predicted ms")
    axes.set_xscale("log")
    plain_ticks(axes.xaxis)
    axes.margins(0.08, 0.15)
    texts = [
        axes.text(*at, "\n".join(names), fontsize="small")
        for at, names in _in_one_place(theirs).items()
    ]
    texts.append(axes.text(*line[-1], "schedule", color=OURS, weight="bold"))
    arrows = {"arrowstyle": "-", "color": TEXT, "lw": 0.4}
    x, y = zip(*line, *theirs.values(), strict=True)
    how = {"expand": (1.05, 1.25), "force_text": (0.15, 0.5)}
    adjust_text(texts, x=x, y=y, ax=axes, arrowprops=arrows, iter_lim=2000, **how)


def _in_one_place(points: Mapping[str, tuple]) -> dict[tuple, list[str]]:
    """Names of points that a picture does not tell apart, by the first of them."""
    found: dict[tuple, list[str]] = {}
    for name, at in points.items():
        near = (p for p in found if all(map(_alike, p, at)))
        found.setdefault(next(near, at), []).append(name)
    return found


def _alike(a: float, b: float) -> bool:
    return abs(a - b) < 0.01 * a


def plain_ticks(axis) -> None:
    """1,000 and not 10 to a power; 1, 2 and 5 of each decade."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.set_minor_formatter(NullFormatter())
