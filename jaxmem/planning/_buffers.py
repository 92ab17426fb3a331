"""Buffers with lifetimes, and the CSV that layout benchmarks exchange.

The format is that of minimalloc (https://github.com/google/minimalloc): a header line
with `id,lower,upper,size`, then one buffer a line; a result has `offset` as a fifth
column.
"""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from jaxmem._checks import check_int, shown, wrong_type, wrong_value

_COLUMNS = ("id", "lower", "upper", "size")


@dataclass(frozen=True)
class Buffer:
    """What takes bytes for a while.

    Attributes:
      id: its name, unlike that of any other buffer.
      lower: when it is made, a whole number in any unit of time.
      upper: when it is freed: alive in [lower, upper).
      size: in bytes; it may be 0.
    """

    id: int | str
    lower: int
    upper: int
    size: int

    def __post_init__(self):
        if type(self.id) not in (int, str):
            if isinstance(self.id, bool) or not isinstance(self.id, int | str):
                raise wrong_type("buffer id", self.id, "an int or a text")
        for name in ("lower", "upper", "size"):
            value = getattr(self, name)
            if type(value) is not int:  # there are many buffers
                value = check_int(f"buffer {self.id}: {name}", value)
                object.__setattr__(self, name, value)
        if self.lower >= self.upper:
            raise ValueError(
                f"buffer {self.id}: lower must be below upper, "
                f"got {self.lower} and {self.upper}"
            )
        if self.size < 0:
            raise ValueError(
                f"buffer {self.id}: size must not be negative: {self.size}"
            )


def read_buffers(path: str | PathLike[str]) -> tuple[Buffer, ...]:
    """The buffers of a CSV file.

    Args:
      path: a file whose header names the columns id, lower, upper and size, in any
        order. Others, such as the offset of a result, are passed over.

    Returns:
      A buffer a line; ids that are whole numbers are `int`, others `str`.

    Raises:
      ValueError: a column is missing, or a row is not a buffer; the message has the
        number of the line.
    """
    check_path(path)
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file, skipinitialspace=True)
        header = [name.strip().lower() for name in next(rows, [])]
        missing = [name for name in _COLUMNS if name not in header]
        if missing:
            raise ValueError(
                f"{path}, line 1: no column {missing[0]!r}; "
                f"the header must name {', '.join(_COLUMNS)}"
            )
        places = [header.index(name) for name in _COLUMNS]
        lines: dict[int | str, int] = {}
        buffers = []
        for row in filter(None, rows):
            try:
                buffer = _buffer([row[p].strip() for p in places])
            except (IndexError, ValueError) as error:
                what = "too few columns" if isinstance(error, IndexError) else error
                raise ValueError(f"{path}, line {rows.line_num}: {what}") from error
            if buffer.id in lines:
                raise ValueError(
                    f"{path}, line {rows.line_num}: buffer {buffer.id} was on line "
                    f"{lines[buffer.id]} already"
                )
            lines[buffer.id] = rows.line_num
            buffers.append(buffer)
    return tuple(buffers)


def write_buffers(
    path: str | PathLike[str],
    buffers: Iterable[Buffer],
    offsets: Mapping[int | str, int] | None = None,
) -> None:
    """Writes buffers as CSV, which `read_buffers` reads.

    Args:
      path: the file.
      buffers: one a line.
      offsets: of each buffer by its id, in bytes; a fifth column.
    """
    check_path(path)
    buffers = check_buffers(buffers)
    if offsets is not None:
        check_offsets(offsets, buffers)
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(_COLUMNS if offsets is None else (*_COLUMNS, "offset"))
        for b in buffers:
            offset = () if offsets is None else (offsets[b.id],)
            out.writerow((b.id, b.lower, b.upper, b.size, *offset))


def check_path(path: Any) -> None:
    """TypeError for what is no path: an int would be an open file's number."""
    if not isinstance(path, str | PathLike) or not str(path):
        raise wrong_type("path", path, "a path, as a text or an os.PathLike")


def check_buffers(buffers: Any) -> tuple[Buffer, ...]:
    """The buffers; errors for what is none, and for two of one id."""
    allowed = "a sequence of jaxmem.planning.Buffer"
    if not isinstance(buffers, Iterable):
        raise wrong_type("buffers", buffers, allowed)
    buffers = tuple(buffers)
    seen: set[int | str] = set()
    for b in buffers:
        if not isinstance(b, Buffer):
            raise wrong_type("buffers", b, f"{allowed}, and this is none")
        if b.id in seen:
            raise ValueError(f"buffers: two have the id {b.id!r}: {shown(b)}")
        seen.add(b.id)
    return buffers


def check_offsets(offsets: Any, buffers: Iterable[Buffer]) -> None:
    """Errors unless each buffer has an offset."""
    allowed = "a mapping from the id of each buffer to its offset, an int"
    if not isinstance(offsets, Mapping):
        raise wrong_type("offsets", offsets, allowed)
    for b in buffers:
        if b.id not in offsets:
            raise wrong_value("offsets", offsets, f"{allowed}: {b.id!r} has none")
        check_int(f"offsets[{b.id!r}]", offsets[b.id])


def _buffer(cells: list[str]) -> Buffer:
    name, *numbers = cells
    for column, cell in zip(_COLUMNS[1:], numbers, strict=True):
        if not cell.removeprefix("-").isdecimal():
            raise ValueError(f"{column} must be a whole number, got {cell!r}")
    lower, upper, size = map(int, numbers)
    # 7 and "07" stay two.
    plain = name.isdecimal() and str(int(name)) == name
    return Buffer(int(name) if plain else name, lower, upper, size)
