"""A layout: the offset of each buffer in one arena."""

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING

from jaxmem.planning.layout.buffers import Buffer, Gap, check_offsets

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Layout:
    """The offset of each buffer in an arena.

    Attributes:
      buffers: the buffers.
      offsets: of each buffer by its id, in bytes from the beginning of the arena.
      lower_bound: bytes; a proven bound of the height: `load` or the largest buffer, or
        more if the search excluded all layouts of that height.
      seconds: duration of the search.
    """

    buffers: tuple[Buffer, ...]
    offsets: Mapping[int | str, int]
    lower_bound: int
    seconds: float = 0.0

    @cached_property
    def height(self) -> int:
        """Bytes of the arena."""
        return max((self.offsets[b.id] + b.size for b in self.buffers), default=0)

    @cached_property
    def load(self) -> int:
        """The most bytes alive at once."""
        return load_of(self.buffers)[0]

    @property
    def optimal(self) -> bool:
        """Whether it is proven that no layout is lower."""
        return self.height <= self.lower_bound

    @property
    def fragmentation(self) -> float:
        """The share of the height that exceeds the load: 0.02 is 2 % of it."""
        return 1 - self.load / self.height if self.height else 0.0

    def check(self) -> None:
        """Raises ValueError unless the layout is valid.

        Offsets must be aligned and not negative, and no two buffers may use the same
        byte at the same time. A sweep over time compares each buffer that is allocated
        with its neighbours in the arena.
        """
        check_offsets(self.offsets, self.buffers)
        for b in self.buffers:
            if self.offsets[b.id] < 0:
                raise ValueError(
                    f"buffer {b.id} lies at {self.offsets[b.id]}, below the arena"
                )
            if self.offsets[b.id] % b.alignment:
                raise ValueError(
                    f"buffer {b.id} lies at {self.offsets[b.id]}, which is no multiple "
                    f"of its alignment {b.alignment}"
                )
        rectangles = [(p, b.id) for b in self.buffers for p in b.rectangles()]
        events = [(p.upper, False, p, name) for p, name in rectangles]
        events += [(p.lower, True, p, name) for p, name in rectangles]
        events.sort(key=lambda event: event[:2])
        alive: list[tuple[int, int, int | str]] = []  # from, to, id; from low to high
        for _, made, rectangle, name in events:
            begin = self.offsets[name] + rectangle.low
            row = (begin, self.offsets[name] + rectangle.high, name)
            at = bisect_left(alive, row[:2], key=lambda r: r[:2])
            if not made:
                del alive[at]
                continue
            for other in alive[max(at - 1, 0) : at + 1]:
                if other[0] < row[1] and begin < other[1]:
                    raise ValueError(
                        f"buffers {other[2]} and {name} overlap: bytes {other[:2]} and "
                        f"{row[:2]}, both alive at {rectangle.lower}"
                    )
            alive.insert(at, row)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draws the buffers as rectangles, time to the right, bytes upwards.

        Args:
          path: the image to write; its suffix says the format (.png, .svg, .pdf).

        Raises:
          ImportError: matplotlib is not installed.
          ValueError: there is no buffer to draw.
        """
        from jaxmem.planning.layout.plot import plot_layout

        plot_layout(self.buffers, self.offsets, self.height, self.load, path)

    def table(self) -> "Table":
        """Height, bound and fragmentation, for rich to print."""
        from rich.table import Table

        table = Table("layout", "", show_header=False)
        for name, value in (
            ("buffers", f"{len(self.buffers):,}"),
            ("height", f"{self.height:,} bytes"),
            ("alive at once", f"{self.load:,} bytes"),
            ("no layout below", f"{self.lower_bound:,} bytes"),
            ("fragmentation", f"{self.fragmentation:.2%}"),
            ("optimal", "yes" if self.optimal else "not proven"),
            ("seconds", f"{self.seconds:.2f}"),
        ):
            table.add_row(name, value)
        return table

    def __rich__(self) -> "Table":
        return self.table()

    def to_json(self, indent: int | None = None) -> str:
        """The layout as JSON text; `from_json` reads it back."""
        rows = [asdict(b) | {"offset": self.offsets[b.id]} for b in self.buffers]
        plain = {"lower_bound": self.lower_bound, "seconds": self.seconds}
        return json.dumps(plain | {"buffers": rows}, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> "Layout":
        """The layout that `to_json` wrote.

        Raises:
          ValueError: the text is not the JSON of a layout.
        """
        try:
            plain = json.loads(text)
            rows = [dict(row) for row in plain["buffers"]]
            offsets = {row["id"]: row.pop("offset") for row in rows}
            for row in rows:
                row["gaps"] = tuple(map(_gap, row.get("gaps", ())))
            buffers = tuple(Buffer(**row) for row in rows)
            return cls(buffers, offsets, plain["lower_bound"], plain["seconds"])
        except (KeyError, TypeError) as error:
            raise ValueError("not the JSON of a Layout") from error


def _gap(row: Mapping) -> Gap:
    window = row["window"]
    return Gap(row["lower"], row["upper"], None if window is None else tuple(window))


class NoLayoutError(RuntimeError):
    """No layout within the capacity was found.

    Attributes:
      best: the lowest layout that was found.
      proven: whether it is proven that there is none within the capacity.
    """

    def __init__(self, message: str, best: Layout, proven: bool):
        super().__init__(message)
        self.best, self.proven = best, proven


def load_of(buffers: tuple[Buffer, ...]) -> tuple[int, int]:
    """The most bytes alive at once, and the first time at which they are."""
    change: dict[int, int] = {}
    for b in buffers:
        for rectangle in b.rectangles():
            size = rectangle.high - rectangle.low
            change[rectangle.lower] = change.get(rectangle.lower, 0) + size
            change[rectangle.upper] = change.get(rectangle.upper, 0) - size
    load, most, moment = 0, 0, 0
    for t in sorted(change):
        load += change[t]
        if load > most:
            most, moment = load, t
    return most, moment
