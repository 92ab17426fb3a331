"""A plan as a table, in plain text and for `rich`.

Above it stand the headline and what was done, below it the remarks.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxmem._checks import array_text
from jaxmem.memory import format_bytes
from jaxmem.pages import aligned, rich_table
from jaxmem.scheduling.plan.data import PlanData
from jaxmem.scheduling.plan.rows import (
    TiledRegion,
)
from jaxmem.scheduling.plan.text import (
    count_of,
    done,
    fits,
    headline,
    more_work,
    remarks,
)

HEAD = ("what", "bytes", "array", "where", "why")
_SHOWN = 30  # rows


def as_text(plan: PlanData) -> str:
    """What `print(plan)` shows."""
    cells = [*rows(plan)]
    lines = aligned(cells)[:_SHOWN]
    return "\n".join([*_above(plan), *lines, *below(plan, len(cells), _SHOWN)])


def as_rich(plan: PlanData) -> Any:
    """The plan as a `rich` table."""
    cells = [*rows(plan)]
    remarks = below(plan, len(cells), _SHOWN)
    return rich_table(HEAD, cells[:_SHOWN], "\n".join(_above(plan)), remarks)


def _above(plan: PlanData) -> list[str]:
    return [headline(plan), *done(plan)]


def below(plan: PlanData, count: int, shown: int) -> list[str]:
    """What is said under a table of `count` rows that shows the first of them."""
    left = [f"... {count - shown} smaller ones"] if count > shown else []
    return [*left, *remarks(plan)]


def rows(plan: PlanData) -> Iterator[tuple[str, ...]]:
    """The cells of a table, below `HEAD`."""
    for report, which in (
        (plan.plain, "the original step"),
        (plan.scheduled, "the scheduled step"),
    ):
        if plan.target and not fits(report):
            size = "" if report is None else format_bytes(report.peak_bytes)
            yield "does not fit", size, "", "", f"{which}, on {plan.target}"
    for g in plan.gradients:
        what = "released" if g.released else "kept"
        yield what, format_bytes(g.bytes), array_text(g), g.path, g.why
    for r in plan.residuals:
        what = "recomputed" if r.bytes > 0 else "kept instead"
        yield what, format_bytes(abs(r.bytes)), array_text(r), r.path, r.how
    for r in plan.recomputed:
        cost = ", ".join(
            filter(None, (count_of(r.times, "time"), more_work(r.seconds)))
        )
        yield f"recomputed {r.operation}", "", array_text(r), r.path, cost
    for r in plan.tiles:
        where = ", ".join(filter(None, (r.path, r.line)))
        size = format_bytes(r.bytes) if r.bytes > 0 else ""
        yield "in tiles", size, array_text(r), where, _tiles_of(r)


def regions(tiles: Sequence[TiledRegion]) -> list[str]:
    """What runs in tiles, a line each."""
    return [
        f"in tiles: {array_text(r)} of {r.path or r.line}, {_tiles_of(r)}"
        for r in tiles
    ]


def _tiles_of(r: TiledRegion) -> str:
    over = f"axis {r.axis}" if r.axis.isdigit() else r.axis
    often = count_of(r.times, "time") if r.times > 1 else ""
    return ", ".join(filter(None, (f"{r.n} over {over}", often, more_work(r.seconds))))
