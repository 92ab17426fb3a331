"""Every published claim beside ours, on the same work or the nearest there is.

    python -m benchmarks.headlines                  # every row, the picture, the page
    python -m benchmarks.headlines Tempo batch      # rows that have both; others stay
    python -m benchmarks.headlines --page           # the picture and the page alone

Rows are in `headline`: some are compiled here, some come from the files that
other commands wrote. Writes results/headlines-*.csv and docs/images/headlines.svg, and
the marked blocks of docs/headlines.md and README.md. A gain is how many times less
memory, or how many times more of what there should be more of. Milliseconds are the
predicted ones of the steps whose bytes a row has.
"""

import pathlib
import subprocess
import sys
from collections.abc import Sequence

from benchmarks._common import MS, Row, publish_some
from benchmarks._pictures import GREY, IMAGES, OURS, TEXT, THEIRS, picture
from benchmarks.figures.headlines import Line, lines
from benchmarks.headline import CLAIMS
from benchmarks.headline.claim import Claim

COLUMNS = (
    *("source", "claim", "published unit", "published before", "published after"),
    *("published gain", "unit", "plain", f"plain: {MS}", "jaxmem", f"jaxmem: {MS}"),
    *("gain", "work", "differs", "link"),
)
PICTURE = IMAGES / "headlines.svg"


def cell(value: float | None) -> float | str:
    return "" if value is None else value


def row(claim: Claim) -> Sequence:
    """What follows the first two cells."""
    found = claim.measure() if claim.measure else None
    ours = (found.before, found.after) if found else (None, None)
    ms = map(cell, found.ms if found else (None, None))
    theirs = claim.before, claim.after
    sides = (x for pair in zip(map(cell, ours), ms, strict=True) for x in pair)
    cells = (
        *(claim.unit, *map(cell, theirs), cell(claim.gain(*theirs))),
        *(found.unit if found else "", *sides, cell(claim.gain(*ours))),
        *(claim.work, claim.differs, claim.link),
    )
    return Row(cells, found.commit if found else "")


def draw(found: Sequence[Line], path: pathlib.Path) -> None:
    """A line a claim, with a mark for each gain, on a scale of logarithms."""
    with picture(path, (10, 0.27 * len(found) + 1.1), font=9) as figure:
        axes = figure.subplots()
        places = range(len(found))
        theirs, ours = ([pair[i] for pair in _gains(found)] for i in (0, 1))
        axes.hlines(places, theirs, ours, color=GREY, linewidth=2, zorder=1)
        axes.scatter(theirs, places, color=THEIRS, label="published", zorder=2)
        axes.scatter(ours, places, color=OURS, label="jaxmem", zorder=2)
        axes.axvline(1, color=TEXT, linewidth=1, linestyle="--")
        axes.set_yticks(places, [f"{x.source}: {x.claim}" for x in found])
        axes.invert_yaxis()
        axes.set_xscale("log")
        ticks = [1, 1.5, 2, 3, 5, 10, 20]
        axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("gain: times less memory, or a batch as many times larger")
        axes.legend(loc="lower right")


def _gains(found: Sequence[Line]) -> list[tuple[float, float]]:
    return [(x.published, x.gain) for x in found if x.published and x.gain]


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--page"]
    if "--page" not in sys.argv:
        cases = {claim.key: lambda claim=claim: row(claim) for claim in CLAIMS}
        publish_some("headlines", COLUMNS, cases, words)
    both = [line for line in lines() if line.published and line.gain]
    draw(sorted(both, key=lambda line: -line.ahead), PICTURE)
    print(f"wrote {PICTURE.relative_to(PICTURE.parent.parent.parent)}")
    # in a process of its own, which reads the file that was just written
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], check=True)


if __name__ == "__main__":
    main()
