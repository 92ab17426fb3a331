"""What the renderers of figures share: rows of the results files, cells, tables."""

import csv
import functools
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence

ROOT = pathlib.Path(__file__).parent.parent.parent
_ON_ONE_LINE = "\N{NO-BREAK SPACE}/\N{NO-BREAK SPACE}"
RESULTS = ROOT / "benchmarks" / "results"
VERSION, NEWEST = "jax0.10.2", "jax0.12.0.1"

Row = Mapping[str, str]
# how figures that stand in one cell are written
TEMP_AND_MS = {"temp MiB": ",.0f", "predicted ms": ",.1f"}
PEAK_AND_MS = {"peak MiB": ",.0f", "predicted ms": ",.1f"}
FIGURES: dict[str, Callable[[], str]] = {}


def figures(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Registers the renderer of a marked block, or of a figure within a sentence."""

    def register(render: Callable[[], str]) -> Callable[[], str]:
        if name in FIGURES:
            raise ValueError(f"two renderers of {name!r}")
        FIGURES[name] = render
        return render

    return register


@functools.cache
def rows(name: str, version: str = "") -> list[Row]:
    """The rows of `results/<name>-<version>.csv`, by default of the newest there is."""
    newest = (RESULTS / f"{name}-{NEWEST}.csv").exists()
    version = version or (NEWEST if newest else VERSION)
    text = (RESULTS / f"{name}-{version}.csv").read_text()
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return list(csv.DictReader(lines))


def row(name: str, where: Mapping[str, str], version: str = "") -> Row:
    """The one row of these values."""
    found = [r for r in rows(name, version) if all(r[k] == v for k, v in where.items())]
    if len(found) != 1:
        raise ValueError(f"{name}: {len(found)} rows have {dict(where)}, one is wanted")
    return found[0]


def value(name: str, column: str, where: Mapping[str, str], version: str = "") -> float:
    return float(row(name, where, version)[column])


def whole(name: str, column: str, where: Mapping[str, str]) -> str:
    """A cell to the unit, as figures in MiB are shown."""
    return f"{value(name, column, where):,.0f}"


def beside_older(
    name: str, columns: Mapping[str, str], where: Mapping[str, str]
) -> str:
    """`with_older` of the row of these values; `columns`: as there."""
    new = row(name, where)
    try:
        old = row(name, where, VERSION)
    except ValueError:  # no such row
        old = new
    return with_older(new, old, columns)


def with_older(new: Row, old: Row, columns: Mapping[str, str]) -> str:
    """Cells with a slash between, and those of the older jax where they are far off.

    `columns`: a column -> how its figure is written. What is far off says `is_far`, of
    a column that both rows have: older files may tell of bytes alone.
    """
    cells = lambda r: {c: float(r[c]) for c in columns if r.get(c)}
    shown = lambda found: _ON_ONE_LINE.join(
        format(x, columns[c]) for c, x in found.items()
    )
    now, then = cells(new), cells(old)
    far = any(is_far(x, then[c]) for c, x in now.items() if c in then)
    return f"{shown(now)} ({shown(then)})" if far else shown(now)


def is_far(new: float, old: float) -> bool:
    """Whether a figure of the older jax is more than 5 % off."""
    return bool(new) and abs(old / new - 1) > 0.05


def with_ms(name: str, head: str) -> str:
    """The head of a column of MiB; some files have no predicted ms."""
    has = any(column.endswith("predicted ms") for column in rows(name)[0])
    return f"{head} / predicted ms" if has else head


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    rule = "|" + "---|" * len(head)
    return "\n".join([_line(head), rule, *map(_line, lines)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |" if any(cells) else "|" + " |" * len(cells)
