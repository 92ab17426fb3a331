"""Live arrays as text and as a rich table, those of equal layers together."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxmem._bytes import format_bytes
from jaxmem._module_path import merge_numbered
from jaxmem.monitoring._live_array import LiveArray

HEAD = "bytes", "array", "where", "memory"
UNNAMED = "not in a named tree"
_SHOWN = 8  # rows of a tree
_NOTES = 6


def cells_of(row: LiveArray) -> tuple[str, str, str, str]:
    """Bytes, array, place and memory of one row."""
    array = _array(row.array, row.count)
    return format_bytes(row.bytes), array, row.place, _where(row)


def as_text(
    headline: str, rows: Sequence[LiveArray], notes: Sequence[str], columns: int
) -> str:
    """Lines of at most so many characters."""
    lines = _wrapped(headline, columns)
    for name, size, merged in _groups(rows):
        lines.append(f"{format_bytes(size):>10}  {name}"[:columns])
        for bytes_, array, path, where in merged[:_SHOWN]:
            lines.append(_line(bytes_, array, path, where, columns))
        if rest := merged[_SHOWN:]:
            size = format_bytes(sum(row[0] for row in rest))
            lines.append(f"    {size:>10}  in {len(rest)} more")
    for note in _first(notes):
        lines += _wrapped(note, columns, "  - ")
    return "\n".join(lines)


def as_rich(headline: str, rows: Sequence[LiveArray], notes: Sequence[str]) -> Any:
    """A table with a line for each tree."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("bytes", justify="right", no_wrap=True)
    for name in HEAD[1:]:
        table.add_column(name, overflow="fold")
    for name, size, merged in _groups(rows):
        table.add_row(format_bytes(size), "", escape(name), "", style="bold")
        for bytes_, *cells in merged[:_SHOWN]:
            table.add_row(format_bytes(bytes_), *map(escape, cells))
        if rest := merged[_SHOWN:]:
            size = format_bytes(sum(row[0] for row in rest))
            table.add_row(size, "", f"in {len(rest)} more", "")
    dim = [Text(note, style="dim") for note in _first(notes)]
    return Group(Text(headline, style="bold"), table, *dim)


def _groups(
    rows: Sequence[LiveArray],
) -> Iterator[tuple[str, int, list[tuple[int, str, str, str]]]]:
    """(tree, bytes, rows) of each tree, the one that has most first."""
    by_name: dict[str, list[LiveArray]] = {}
    for row in rows:
        if row.count or row.bytes:
            by_name.setdefault(row.name, []).append(row)
    sizes = {name: sum(row.bytes for row in of) for name, of in by_name.items()}
    for name in sorted(by_name, key=lambda name: -abs(sizes[name])):
        yield name or UNNAMED, sizes[name], _merged(by_name[name])


def _merged(rows: Iterable[LiveArray]) -> list[tuple[int, str, str, str]]:
    """(bytes, array, path, where), a star for the numbers of many equal layers."""
    rows = list(rows)
    paths = merge_numbered(row.path for row in rows)
    sizes: dict[tuple[str, str, str], list[int]] = {}
    for row in rows:
        total = sizes.setdefault((paths[row.path], row.array, _where(row)), [0, 0])
        total[0] += row.bytes
        total[1] += row.count
    lines = [
        (size, _array(array, count), path, where)
        for (path, array, where), (size, count) in sizes.items()
    ]
    return sorted(lines, key=lambda line: -abs(line[0]))


def _array(array: str, count: int) -> str:
    return array if count == 1 else f"{count} x {array}"


def _where(row: LiveArray) -> str:
    memory = "" if row.memory == "device" else row.memory
    return ", ".join(filter(None, [row.placement, memory]))


def _line(size: int, array: str, path: str, where: str, columns: int) -> str:
    """The path, whose end says most, is cut where the line would be too long."""
    start = f"    {format_bytes(size):>10}  {array:<20}"
    end = f"  ({where})" if where else ""
    room = columns - len(start) - len(end) - 1
    if len(path) > room:
        path = f"…{path[len(path) - max(room, 4) + 1 :]}"
    return f"{start} {path}{end}".rstrip()[:columns]


def _first(notes: Sequence[str]) -> list[str]:
    rest = len(notes) - _NOTES
    return [*notes[:_NOTES], *([f"and {rest} more notes"] if rest > 0 else [])]


def _wrapped(text: str, columns: int, first: str = "") -> list[str]:
    return textwrap.wrap(
        text, columns, initial_indent=first, subsequent_indent=" " * len(first)
    )
