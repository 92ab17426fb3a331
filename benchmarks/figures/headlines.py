"""Published claims beside ours: tables of docs/headlines.md and of the README."""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.figures.rows import VERSION, Row, figures, is_far, row, rows, table

BEST = 5


class Line(NamedTuple):
    """A row of results/headlines.

    Attributes:
      source, claim: of whom, and what.
      theirs: the published figures with their unit; empty if there are none.
      ours: likewise, with those of the older jax where they are far off.
      ms: predicted milliseconds of both steps of ours, and how many times as long.
      published, gain: how many times less, or more; None without figures.
      work, differs, link: as in the file.
    """

    source: str
    claim: str
    theirs: str
    ours: str
    ms: str
    published: float | None
    gain: float | None
    work: str
    differs: str
    link: str

    @property
    def ahead(self) -> float:
        """Our gain over the published one."""
        return self.gain / self.published if self.gain and self.published else 0.0


def lines() -> list[Line]:
    return [_line(r) for r in rows("headlines")]


def _line(r: Row) -> Line:
    number = lambda name: float(r[name]) if r[name] else None
    return Line(
        *(r["source"], r["claim"]),
        _pair(r["published before"], r["published after"], r["published unit"]),
        *(_beside_older(r), _ms(r)),
        *(number("published gain"), number("gain")),
        *(r["work"], r["differs"], r["link"]),
    )


def _beside_older(r: Row) -> str:
    """Ours, and in brackets that of the older jax where it is more than 5 % off."""
    sides = ("plain", "jaxmem")
    new, old = ([x[side] for side in sides] for x in (r, _older(r)))
    shown = _pair(*new, r["unit"])
    pairs = zip(new, old, strict=True)
    if all(new) and any(is_far(float(x), float(y)) for x, y in pairs):
        return f"{shown} ({_pair(*old, '').strip()})"
    return shown


def _older(r: Row) -> Row:
    """The same claim in the older file; the row itself if it is not there."""
    same = lambda o: all(o[key] == r[key] for key in ("source", "claim", "unit"))
    return next(filter(same, rows("headlines", VERSION)), r)


def _ms(r: Row) -> str:
    """Both steps' milliseconds; none where a row is of no step, or of two chips."""
    cells = [r.get(f"{side}: predicted ms") for side in ("plain", "jaxmem")]
    if not all(cells):
        return ""
    before, after = map(float, cells)
    return f"{_shown(before)} → {_shown(after)} ({after / before:.2f}x)"


def _pair(before: str, after: str, unit: str) -> str:
    if not before:
        return ""
    shown = [_shown(float(x)) for x in (before, after)]
    return f"{shown[0]} → {shown[1]} {unit}"


def _shown(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 or x == round(x) else f"{x:.3g}"


def _times(gain: float | None) -> str:
    return "" if gain is None else f"{gain:.2f}x"


def _cells(line: Line, number: int) -> Sequence[str]:
    source = f"[{line.source}]({line.link})"
    gains = _times(line.published), _times(line.gain)
    return source, line.claim, line.theirs, line.ours, line.ms, *gains, str(number)


@figures("headlines")
def headlines() -> str:
    head = (
        *("of", "claim", "published", "plain → jaxmem", "predicted ms"),
        *("published gain", "gain of jaxmem", "note"),
    )
    return _used(head, [_cells(line, n) for n, line in enumerate(lines(), 1)])


def _used(head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A table without empty columns: an older file has no milliseconds."""
    columns = zip(head, *cells, strict=True)
    head, *cells = zip(*(c for c in columns if any(c[1:])), strict=True)
    return table(head, cells)


@figures("headlines, notes")
def notes() -> str:
    """What ours is of, and how it differs: a list with the numbers of the table."""
    said = (
        " ".join(x for x in (f"{line.work}." if line.work else "", line.differs) if x)
        for line in lines()
    )
    return "\n".join(f"{n}. {text}" for n, text in enumerate(said, 1))


@figures("headlines, count")
def count() -> str:
    """In how many of the rows with two figures ours is ahead."""
    both = [line for line in lines() if line.ahead]
    better = sum(line.ahead > 1 for line in both)
    return f"{better} of {len(both)}"


@figures("headlines, replay")
def replay() -> str:
    """Bytes and time of the LSTM that is replayed through time."""
    return _sentence("Memformer")


@figures("headlines, late layers")
def late_layers() -> str:
    """Bytes and time of a model whose late layers are trained."""
    return _sentence("SHERL")


def _sentence(source: str) -> str:
    found = row("headlines", {"source": source})
    joined = lambda cells: " to ".join(_shown(float(x)) for x in cells)
    sizes, ms = (
        [found.get(f"{side}{column}") for side in ("plain", "jaxmem")]
        for column in ("", ": predicted ms")
    )
    took = f", in {joined(ms)} predicted ms" if all(ms) else ""
    return f"{joined(sizes)} {found['unit']}{took}"


@figures("headlines, README")
def readme() -> str:
    """The rows furthest ahead, one of each source, and the row furthest behind."""
    ranked = sorted((x for x in lines() if x.ahead), key=lambda x: -x.ahead)
    first: dict[str, Line] = {}
    for line in ranked:
        first.setdefault(line.source, line)
    chosen = [*list(first.values())[:BEST], ranked[-1]]
    head = (
        "published claim",
        "published",
        "plain → jaxmem",
        "predicted ms",
        "published gain",
        "gain of jaxmem",
    )
    return _used(
        head,
        [
            (
                f"[{x.source}]({x.link}): {x.claim}",
                *(x.theirs, x.ours, x.ms, _times(x.published), _times(x.gain)),
            )
            for x in chosen
        ],
    )
