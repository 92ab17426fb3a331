"""The README's picture: bytes alive over one train step, before and after.

    python -m benchmarks.before_after

BERT-Large and Adam, 8 sequences of 512 tokens, compiled for an H100: the step as XLA
compiles it, with `jaxmem.substitute`, and with `jaxmem.schedule` besides. Writes the
figures, predicted milliseconds of a step among them, to results/ and the picture of the
first and the last to docs/images/.
"""

import pathlib
from collections.abc import Mapping

from benchmarks._common import MIB, MS, milliseconds, publish
from benchmarks._pictures import DARK, GREY, IMAGES, OURS, TEXT, THEIRS, picture
from benchmarks.batch import SMALL, TARGET, arguments, step_of
from jaxmem.memory import MemoryReport, estimate

WAYS = ("plain", "substituted", "substituted, schedule")
DRAWN = {"plain": "the step as it was", "substituted, schedule": "with jaxmem"}
COLUMNS = ("step", "target", "peak MiB", "temp MiB", "state and batch MiB", MS)
PICTURE = IMAGES / "before_after.svg"
COLOURS = THEIRS, OURS
GIB = 2**30


def measured(how: str) -> MemoryReport:
    step, state = step_of(how)
    return estimate(step, *arguments(state, SMALL), target=TARGET, donate_argnums=0)


def row(how: str, report: MemoryReport) -> list:
    sizes = report.peak_bytes, report.temp_bytes, report.argument_bytes
    return [how, TARGET, *(size / MIB for size in sizes), milliseconds(report)]


def draw(reports: Mapping[str, MemoryReport], path: pathlib.Path) -> None:
    """Two reports by title on one scale: what is always there in grey."""
    with picture(path, (9, 3.4), font=11) as figure:
        both = figure.subplots(1, 2, sharey=True)
        for axes, colour, (title, report) in zip(
            both, COLOURS, reports.items(), strict=True
        ):
            _curve(axes, report, colour, title)
        both[0].set_ylabel("GiB on the chip")
        most = max(report.peak_bytes for report in reports.values())
        both[0].set_ylim(0, 1.18 * most / GIB)


def _curve(axes, report: MemoryReport, colour: str, title: str) -> None:
    last = report.timeline[-1].index + 1
    places = [100 * step.index / last for step in report.timeline] + [100]
    live = [step.bytes / GIB for step in report.timeline]
    live.append(live[-1])
    state = report.argument_bytes / GIB
    peak = report.peak_bytes / GIB
    axes.fill_between(places, live, step="post", color=colour, linewidth=0)
    axes.fill_between([0, 100], state, color=GREY, linewidth=0)
    axes.axhline(peak, color=TEXT, linewidth=1, linestyle="--")
    axes.text(1, peak * 1.02, f"peak {peak:.1f} GiB", va="bottom")
    axes.text(2, state / 2, "weights and Adam's moments", color=DARK, va="center")
    axes.set_title(title)
    axes.set_xlim(0, 100)
    axes.set_xticks([0, 50, 100], ["start", "one train step", "end"])
    first, _, last_label = axes.get_xticklabels()
    first.set_ha("left")
    last_label.set_ha("right")


if __name__ == "__main__":
    reports = {how: measured(how) for how in WAYS}
    publish("before_after", COLUMNS, [row(*pair) for pair in reports.items()])
    draw({title: reports[how] for how, title in DRAWN.items()}, PICTURE)
    print(f"wrote {PICTURE.relative_to(PICTURE.parent.parent.parent)}")
