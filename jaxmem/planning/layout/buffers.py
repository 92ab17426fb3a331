"""Buffers with lifetimes, which are laid out in an arena."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxmem._checks import check_int, shown, wrong_type, wrong_value

TIMES = -(2**63), 2**63 - 1  # a time is an int64
SIZES = 0, 2**61 - 1  # the sum of two heights must still be an int64


@dataclass(frozen=True)
class Gap:
    """A time in the life of a buffer in which none or only a part of it is in use.

    Attributes:
      lower: when it begins.
      upper: when it ends: the gap is [lower, upper).
      window: the bytes of the buffer that stay in use, [low, high) from its beginning;
        None means none of them.

    Raises:
      ValueError: `lower` is not below `upper`, or `window` is no range of bytes.
    """

    lower: int
    upper: int
    window: tuple[int, int] | None = None

    def __post_init__(self):
        for name in ("lower", "upper"):
            value = _whole("gap", name, getattr(self, name), TIMES)
            object.__setattr__(self, name, value)
        if self.lower >= self.upper:
            raise ValueError(
                f"gap: lower must be below upper, got {self.lower} and {self.upper}"
            )
        if self.window is not None:
            object.__setattr__(self, "window", _window(self.window))

    def __str__(self) -> str:
        """As in a CSV of minimalloc: 7-9, or 7-9@0:64 with a window."""
        part = "" if self.window is None else "@{}:{}".format(*self.window)
        return f"{self.lower}-{self.upper}{part}"


class Rectangle(NamedTuple):
    """Bytes [low, high) of a buffer that are in use during [lower, upper)."""

    lower: int
    upper: int
    low: int
    high: int


@dataclass(frozen=True)
class Buffer:
    """Bytes that are in use for a while.

    Attributes:
      id: its name, unlike that of any other buffer.
      lower: when it is allocated: an int64 in any unit of time.
      upper: when it is freed: it is alive in [lower, upper).
      size: in bytes, below 2 ** 61; it may be 0.
      alignment: bytes; its offset must be a multiple of this.
      gaps: times at which none or only a part of it is in use; within its life and
        without overlap.

    Raises:
      ValueError: one of them is out of range; the message says which.
    """

    id: int | str
    lower: int
    upper: int
    size: int
    alignment: int = 1
    gaps: tuple[Gap, ...] = ()

    def __post_init__(self):
        if type(self.id) not in (int, str):
            if isinstance(self.id, bool) or not isinstance(self.id, int | str):
                raise wrong_type("buffer id", self.id, "an int or a text")
        what = f"buffer {self.id}"
        for name, allowed in _COLUMNS.items():
            value = _whole(what, name, getattr(self, name), allowed)
            object.__setattr__(self, name, value)
        if self.lower >= self.upper:
            raise ValueError(
                f"{what}: lower must be below upper, got {self.lower} and {self.upper}"
            )
        if self.gaps:
            self._check_gaps(what)

    def _check_gaps(self, what: str) -> None:
        given: Any = self.gaps
        several = isinstance(given, Iterable) and not isinstance(given, str | Gap)
        gaps: tuple[Any, ...] = tuple(given) if several else (given,)
        if not all(isinstance(gap, Gap) for gap in gaps):
            raise wrong_type(f"{what}: gaps", self.gaps, "a sequence of Gap")
        object.__setattr__(self, "gaps", gaps)
        wrong = lambda why: wrong_value(f"{what}: gaps", gaps, why)
        before = None
        for gap in sorted(gaps, key=_lower):
            if gap.lower < self.lower or gap.upper > self.upper:
                life = f"[{self.lower}, {self.upper})"
                raise wrong(f"must lie within {life}, and {gap} does not")
            if before is not None and gap.lower < before.upper:
                raise wrong(f"must not overlap, as {before} and {gap} do")
            if gap.window is not None and gap.window[1] > self.size:
                raise wrong(f"windows must lie within {self.size} bytes, unlike {gap}")
            before = gap

    def rectangles(self) -> Iterator[Rectangle]:
        """The rectangles that it occupies, in the order of time; none without bytes."""
        if not self.size:
            return
        since = self.lower
        for gap in sorted(self.gaps, key=_lower):
            if since < gap.lower:
                yield Rectangle(since, gap.lower, 0, self.size)
            if gap.window is not None:
                yield Rectangle(gap.lower, gap.upper, *gap.window)
            since = gap.upper
        if since < self.upper:
            yield Rectangle(since, self.upper, 0, self.size)


def _lower(gap: Gap) -> int:
    return gap.lower


_COLUMNS = {
    "lower": TIMES,
    "upper": TIMES,
    "size": SIZES,
    "alignment": (1, SIZES[1]),
}


def _whole(what: str, name: str, value: Any, allowed: tuple[int, int]) -> int:
    if type(value) is int and allowed[0] <= value <= allowed[1]:
        return value  # there are many buffers, and most are valid
    return check_int(f"{what}: {name}", value, *allowed)


def _window(window: Any) -> tuple[int, int]:
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise wrong_type("gap: window", window, "two numbers of bytes, or None")
    low, high = (_whole("gap", "window", part, SIZES) for part in window)
    if low >= high:
        raise ValueError(
            f"gap: the window must begin below its end, got {low} and {high}"
        )
    return low, high


def check_buffers(buffers: Any) -> tuple[Buffer, ...]:
    """Returns the buffers; errors for other types, and for two with one id."""
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
    """Raises an error unless each buffer has an offset."""
    allowed = "a mapping from the id of each buffer to its offset, an int"
    if not isinstance(offsets, Mapping):
        raise wrong_type("offsets", offsets, allowed)
    for b in buffers:
        if b.id not in offsets:
            raise wrong_value("offsets", offsets, f"{allowed}: {b.id!r} has none")
        check_int(f"offsets[{b.id!r}]", offsets[b.id])
