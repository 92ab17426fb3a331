"""Buffers with lifetimes, and the CSV that layout benchmarks exchange.

The format is that of minimalloc (https://github.com/google/minimalloc): a header line
with `id,lower,upper,size`, then one buffer a line; a result has `offset` as a fifth
column.
"""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike

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
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(_COLUMNS if offsets is None else (*_COLUMNS, "offset"))
        for b in buffers:
            offset = () if offsets is None else (offsets[b.id],)
            out.writerow((b.id, b.lower, b.upper, b.size, *offset))


def _buffer(cells: list[str]) -> Buffer:
    name, *numbers = cells
    for column, cell in zip(_COLUMNS[1:], numbers, strict=True):
        if not cell.removeprefix("-").isdecimal():
            raise ValueError(f"{column} must be a whole number, got {cell!r}")
    lower, upper, size = map(int, numbers)
    # 7 and "07" stay two.
    plain = name.isdecimal() and str(int(name)) == name
    return Buffer(int(name) if plain else name, lower, upper, size)
