"""Rows of text as lines whose columns are aligned, and as a table of rich."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any


def aligned(rows: Sequence[Sequence[str]], numbers: Collection[int] = ()) -> list[str]:
    """A line for each row; columns `numbers` are aligned at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return list(map(line, rows))


def rich_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str,
    below: Iterable[str] = (),
    **how: Any,
) -> Any:
    """What `rich.print` shows, in which no text is markup; `how`: of rich's table."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(*head, title=escape(title), **how)
    for row in rows:
        table.add_row(*map(escape, row))
    table.caption = "\n".join(map(escape, below)) or None
    return table
