"""The CSV that layout benchmarks exchange.

The format is that of minimalloc (https://github.com/google/minimalloc): a header line
that names the columns, then one buffer a line. `id`, `lower`, `upper` and `size` are
required, `alignment` and `gaps` optional; a result has `offset`. Gaps are separated by
blanks, each `lower-upper`, or `lower-upper@low:high` where bytes low to high stay.
"""

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any

from jaxmem._checks import wrong_type
from jaxmem.planning.layout.buffers import (
    SIZES,
    TIMES,
    Buffer,
    Gap,
    check_buffers,
    check_offsets,
)

_NEEDED = ("id", "lower", "upper", "size")
_OPTIONAL = ("alignment", "gaps")
# Older names; an "end" is inclusive: the last time at which the buffer is in use.
_ALIASES = {"buffer": "id", "buffer_id": "id", "start": "lower", "begin": "lower"}
_INCLUSIVE = "end"
_GAP = re.compile(r"(-?\d+)-(-?\d+)(?:@(\d+):(\d+))?", re.ASCII)
_RANGES = {"size": SIZES, "alignment": (1, SIZES[1])}


def read_buffers(path: str | PathLike[str]) -> tuple[Buffer, ...]:
    """The buffers of a CSV file.

    Args:
      path: a file in UTF-8 whose header names the columns id, lower, upper and size,
        and optionally alignment and gaps, in any order (or by minimalloc's older names:
        buffer, start and end, which is inclusive). Other columns, such as the offset of
        a result, and blank lines are ignored.

    Returns:
      One buffer a line; ids that are whole numbers are `int`, others `str`.

    Raises:
      ValueError: the file is not UTF-8 or no CSV, a column is missing or given twice,
        or a row is not a buffer; the message names the file, the line, the column and
        what is allowed.
      OSError: the file cannot be read.
    """
    _check_path(path)
    rows = csv.reader(
        io.StringIO(_text(path), newline=""), strict=True, skipinitialspace=True
    )
    buffers: list[Buffer] = []
    lines: dict[int | str, int] = {}
    try:
        columns = _Columns(next(rows, []))
        for row in rows:
            if len(row) < 2 and not "".join(row).strip():
                continue
            buffer = columns.buffer(row)
            if buffer.id in lines:
                raise ValueError(
                    f"buffer {buffer.id} was on line {lines[buffer.id]} already"
                )
            lines[buffer.id] = rows.line_num
            buffers.append(buffer)
    except (csv.Error, ValueError) as error:
        line = max(rows.line_num, 1)
        raise ValueError(f"{path}, line {line}: {error}") from error
    return tuple(buffers)


def _check_path(path: Any) -> None:
    """TypeError for anything but a path; `open` would take an int as a descriptor."""
    if not isinstance(path, str | PathLike) or not str(path):
        raise wrong_type("path", path, "a path, as a text or an os.PathLike")


def _text(path: str | PathLike[str]) -> str:
    data = Path(path).read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line}: the file must be UTF-8; byte {error.start} is "
            f"0x{data[error.start]:02x}"
        ) from error


class _Columns:
    """The positions of the columns in a row."""

    def __init__(self, header: Sequence[str]):
        given = [name.strip().lower() for name in header]
        self._last = 1 if _INCLUSIVE in given else 0  # is added to each upper
        names = [_ALIASES.get(name, name) for name in given]
        names = ["upper" if name == _INCLUSIVE else name for name in names]
        missing = [name for name in _NEEDED if name not in names]
        if missing:
            raise ValueError(
                f"no column {missing[0]!r}; the header must name {', '.join(_NEEDED)}"
            )
        for name in (*_NEEDED, *_OPTIONAL):
            if names.count(name) > 1:
                raise ValueError(f"two columns {name!r}; the header must name it once")
        self._names = names
        self._places = {
            name: names.index(name) for name in (*_NEEDED, *_OPTIONAL) if name in names
        }

    def buffer(self, row: Sequence[str]) -> Buffer:
        """The buffer of a row; ValueError for a row that has none."""
        count = len(self._names)
        if len(row) < count:
            raise ValueError(f"too few columns: {len(row)}, the header names {count}")
        if any(cell.strip() for cell in row[count:]):
            raise ValueError(f"too many columns: {len(row)}, the header names {count}")
        cells = {name: row[place].strip() for name, place in self._places.items()}
        number = lambda name: _number(name, cells[name], _RANGES.get(name, TIMES))
        if not cells["id"]:
            raise ValueError("id must not be empty")
        alignment = number("alignment") if cells.get("alignment") else 1
        return Buffer(
            _id(cells["id"]),
            number("lower"),
            number("upper") + self._last,
            number("size"),
            alignment,
            tuple(self._gap(text) for text in cells.get("gaps", "").split()),
        )

    def _gap(self, text: str) -> Gap:
        found = _GAP.fullmatch(text)
        if not found:
            raise ValueError(
                f"gaps must be lower-upper or lower-upper@low:high, got {text!r}"
            )
        lower, upper, *window = found.groups()
        times = [_number("gaps", cell, TIMES) for cell in (lower, upper)]
        part = [_number("gaps", cell, SIZES) for cell in window if cell is not None]
        return Gap(
            times[0], times[1] + self._last, (part[0], part[1]) if part else None
        )


def _number(name: str, cell: str, allowed: tuple[int, int]) -> int:
    low, high = allowed
    plain = cell.removeprefix("-")
    # Longer ones are out of range, and `int` refuses the very long.
    if plain.isascii() and plain.isdecimal() and len(plain.lstrip("0")) < 20:
        value = int(cell)
        if low <= value <= high:
            return value
        if name == "size" and value < 0:
            raise ValueError(f"size must not be negative: {value}")
    shown = cell if len(cell) <= 40 else f"{cell[:40]}..."
    raise ValueError(
        f"{name} must be a whole number from {low} to {high}, got {shown!r}"
    )


def _id(cell: str) -> int | str:
    """An int if the cell is its plain form; "07" stays a text, unlike 7."""
    plain = cell.isascii() and cell.isdecimal() and len(cell) < 20
    return int(cell) if plain and str(int(cell)) == cell else cell


def write_buffers(
    path: str | PathLike[str],
    buffers: Iterable[Buffer],
    offsets: Mapping[int | str, int] | None = None,
) -> None:
    """Writes buffers as CSV, which `read_buffers` reads.

    Args:
      path: the file.
      buffers: one a line; columns alignment and gaps are written if a buffer has any.
      offsets: of each buffer by its id, in bytes; a last column.

    Raises:
      ValueError: an id would not be read back (it is empty, begins or ends with a
        blank, or is that of another buffer), or `offsets` lacks one.
      OSError: the file cannot be written.
    """
    _check_path(path)
    buffers = check_buffers(buffers)
    _check_ids(buffers)
    if offsets is not None:
        check_offsets(offsets, buffers)
    cells: dict[str, Callable[[Buffer], object]]
    cells = {name: attrgetter(name) for name in _NEEDED}
    if any(b.alignment != 1 for b in buffers):
        cells["alignment"] = attrgetter("alignment")
    if any(b.gaps for b in buffers):
        cells["gaps"] = lambda b: " ".join(map(str, b.gaps))
    if offsets is not None:
        cells["offset"] = lambda b: offsets[b.id]
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(cells)
        out.writerows([cell(b) for cell in cells.values()] for b in buffers)


def _check_ids(buffers: Iterable[Buffer]) -> None:
    """ValueError for ids that a CSV cannot tell apart, such as 7 and "7"."""
    seen: set[str] = set()
    for b in buffers:
        name = str(b.id)
        if not name or name != name.strip():
            raise ValueError(
                f"buffers: an id must not be empty, nor begin or end with a blank, in "
                f"a CSV; got {b.id!r}"
            )
        if name in seen:
            raise ValueError(f"buffers: two have the id {name!r} in a CSV")
        seen.add(name)
