"""Offsets for buffers in one arena: dynamic storage allocation.

Buffers that are alive together must not overlap; the arena ends where the highest of
them does. Its least height is hard to find; what is alive at once is a lower bound,
which a layout often reaches. `layout` splits time where nothing is alive, lays out by
best fit in a few orders, of which ROAM's is one (`_layout_fit`), and goes on from there
until it has reached the bound, the capacity or the end of its time (`_layout_improve`).
A buffer may have gaps, in which it is not there or only a part of it, and an alignment.
"""

import json
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxmem._checks import (
    check_callable,
    check_choice,
    check_float,
    check_int,
    wrong_type,
)
from jaxmem.planning.layout.buffers import (
    SIZES,
    Buffer,
    Gap,
    check_buffers,
    check_offsets,
)
from jaxmem.planning.layout.fit import best_fit as fit_in_order
from jaxmem.planning.layout.fit import simple_order
from jaxmem.planning.layout.improve import improve
from jaxmem.planning.layout.incumbent import least_height
from jaxmem.planning.layout.problem import LayoutProblem, make_problem

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Layout:
    """Where each buffer lies.

    Attributes:
      buffers: what is laid out.
      offsets: of each buffer by its id, in bytes from the beginning of the arena.
      lower_bound: bytes below which no layout is, proven: `load` or the largest buffer,
        or more where the search went through all layouts of that height.
      seconds: of planning.
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
        return _load(self.buffers)[0]

    @property
    def optimal(self) -> bool:
        """Whether it is proven that no layout is lower."""
        return self.height <= self.lower_bound

    @property
    def fragmentation(self) -> float:
        """The part of the height by which it is over the load: 0.02 is 2 % of it."""
        return 1 - self.load / self.height if self.height else 0.0

    def check(self) -> None:
        """Raises ValueError unless the layout is one.

        Two buffers must not lie in the same place at the same time, none below the
        arena, and each aligned. A sweep over time that compares what is made with its
        neighbours in the arena.
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
        pieces = [(p, b.id) for b in self.buffers for p in b.pieces()]
        events = [(p.upper, False, p, name) for p, name in pieces]
        events += [(p.lower, True, p, name) for p, name in pieces]
        events.sort(key=lambda event: event[:2])
        alive: list[tuple[int, int, int | str]] = []  # from, to, id; from low to high
        for _, made, piece, name in events:
            begin = self.offsets[name] + piece.low
            row = (begin, self.offsets[name] + piece.high, name)
            at = bisect_left(alive, row[:2], key=lambda r: r[:2])
            if not made:
                del alive[at]
                continue
            for other in alive[max(at - 1, 0) : at + 1]:
                if other[0] < row[1] and begin < other[1]:
                    raise ValueError(
                        f"buffers {other[2]} and {name} overlap: bytes {other[:2]} and "
                        f"{row[:2]}, both alive at {piece.lower}"
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

        plot_layout(self, path)

    def table(self) -> "Table":
        """Height, bound and what is lost between buffers, for rich to print."""
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
          ValueError: the text is not a layout; the message says what of it is not.
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
      best: the lowest that was.
      proven: whether there is none.
    """

    def __init__(self, message: str, best: Layout, proven: bool):
        super().__init__(message)
        self.best, self.proven = best, proven


def layout(
    buffers: Iterable[Buffer],
    *,
    capacity: int | None = None,
    alignment: int = 1,
    time_limit: float = 10.0,
    long_lived: Collection[int | str] = (),
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Layout:
    """Lays buffers out in an arena that is as low as can be found.

    Without a capacity it is never higher than the lower of the two of `best_fit`.

    Args:
      buffers: what to lay out.
      capacity: bytes of the arena; the first layout within is taken. Without, and where
        there is none, the search goes on until it has the lowest, or no more time.
      alignment: of every buffer, in bytes, beside its own.
      time_limit: seconds after which the best so far is taken; the first two layouts,
        those of `best_fit`, are always finished.
      long_lived: ids of what stays for long, such as the activations that a training
        step keeps for its backward pass: laid at the bottom, before everything else, in
        one of the first layouts. What lives long is found without, too.
      seed: of the search's chance. The same seed gives the same layout, where the time
        suffices.
      progress: called with the least height so far and the proven bound, in bytes.

    Returns:
      A `Layout`.

    Raises:
      ValueError: two buffers have an id, more is alive at once than `capacity`, or an
        argument is out of range; the message says which.
      NoLayoutError: no layout within `capacity` was found in time, or there is none;
        it has the lowest that was.

    Source: for training steps ROAM (https://arxiv.org/abs/2310.19295, section 3.4).
    """
    begin = time.monotonic()
    buffers = _aligned(_checked(buffers), alignment)
    time_limit = check_float("time_limit", time_limit, at_least=0, infinite=True)
    seed = check_int("seed", seed, 0)
    if capacity is not None:
        capacity = check_int("capacity", capacity, 0)
    if progress is not None:
        check_callable("progress", progress, "a function, or None")
    load, moment = _load(buffers)
    largest = max(buffers, key=lambda b: b.size, default=None)
    if capacity is not None and largest is not None and capacity < largest.size:
        raise ValueError(
            f"capacity={capacity:,} bytes is less than the {largest.size:,} bytes of "
            f"buffer {largest.id}"
        )
    if capacity is not None and capacity < load:
        raise ValueError(
            f"capacity={capacity:,} bytes is less than the {load:,} bytes "
            f"that are alive at time {moment}"
        )
    problem, some = _arrays(buffers)
    wanted = _long_lived(long_lived, {b.id for b in buffers})
    early = np.array([buffers[i].id in wanted for i in some], bool)
    unit = problem.unit
    offsets, bound = improve(
        problem,
        None if capacity is None else capacity // unit,
        early,
        begin + time_limit,
        seed,
        lambda h, b: progress(h * unit, b * unit) if progress else None,
    )
    found = _layout(buffers, problem, some, offsets, bound, begin)
    if capacity is not None and found.height > capacity:
        raise _too_high(found, capacity, time_limit)
    return found


def best_fit(
    buffers: Iterable[Buffer],
    by: Literal["size", "lifetime"] = "size",
    *,
    alignment: int = 1,
) -> Layout:
    """Lays buffers out as XLA does: one after another, each into the tightest gap.

    XLA keeps the lower of the two layouts.

    Args:
      buffers: what to lay out.
      by: which comes first: the largest, or the one that lives longest.
      alignment: of every buffer, in bytes, beside its own.

    Returns:
      A `Layout`.

    Raises:
      ValueError: two buffers have an id, or another argument is something else.
    """
    begin = time.monotonic()
    check_choice("by", by, ("size", "lifetime"))
    buffers = _aligned(_checked(buffers), alignment)
    problem, some = _arrays(buffers)
    offsets = fit_in_order(problem, simple_order(problem, by))
    bound = least_height(problem)
    return _layout(buffers, problem, some, offsets, bound, begin)


def _checked(buffers: Iterable[Buffer]) -> tuple[Buffer, ...]:
    buffers = check_buffers(buffers)
    if sum(b.size for b in buffers) > SIZES[1]:
        raise ValueError("buffers: 2 EiB and more together is more than can be counted")
    return buffers


def _aligned(buffers: tuple[Buffer, ...], alignment: int) -> tuple[Buffer, ...]:
    """The buffers with an alignment beside their own, which leaves room to count."""
    alignment = check_int("alignment", alignment, 1)
    common = [math.lcm(b.alignment, alignment) for b in buffers]
    # Every buffer may be moved up by as much.
    if sum(common) + sum(b.size for b in buffers) > SIZES[1]:
        most = max(zip(common, buffers, strict=True), key=lambda pair: pair[0])
        raise ValueError(
            f"alignment: {most[0]:,} bytes for buffer {most[1].id}: with as much lost "
            "at each, more than 2 EiB together is more than can be counted"
        )
    if alignment == 1:
        return buffers
    pairs = zip(buffers, common, strict=True)
    return tuple(replace(b, alignment=a) for b, a in pairs)


def _long_lived(ids: Any, known: set[int | str]) -> set[int | str]:
    """The ids, each of a buffer."""
    allowed = "a collection of ids of buffers"
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise wrong_type("long_lived", ids, allowed)
    found = list(ids)
    for one in found:
        if not isinstance(one, int | str):
            raise wrong_type("long_lived", ids, allowed)
        if one not in known:
            raise ValueError(f"long_lived: no buffer has the id {one!r}; {allowed}")
    return set(found)


def _load(buffers: tuple[Buffer, ...]) -> tuple[int, int]:
    """The most bytes alive at once, and when first."""
    change: dict[int, int] = {}
    for b in buffers:
        for piece in b.pieces():
            size = piece.high - piece.low
            change[piece.lower] = change.get(piece.lower, 0) + size
            change[piece.upper] = change.get(piece.upper, 0) - size
    load, most, moment = 0, 0, 0
    for t in sorted(change):
        load += change[t]
        if load > most:
            most, moment = load, t
    return most, moment


def _arrays(buffers: tuple[Buffer, ...]) -> tuple[LayoutProblem, list[int]]:
    """The problem, and which buffers are in it."""
    some = [i for i, b in enumerate(buffers) if next(b.pieces(), None) is not None]
    return make_problem([buffers[i] for i in some]), some


def _layout(buffers, problem, some, offsets, bound, begin) -> Layout:
    found = {b.id: 0 for b in buffers}
    for i, offset in zip(some, (offsets * problem.unit).tolist(), strict=True):
        found[buffers[i].id] = offset
    # One that is never there, for its gaps, lies within the arena, too.
    bound = max(int(bound) * problem.unit, max((b.size for b in buffers), default=0))
    return Layout(buffers, found, bound, time.monotonic() - begin)


def _too_high(found: Layout, capacity: int, time_limit: float) -> NoLayoutError:
    proven = found.lower_bound > capacity
    over = found.height / capacity - 1
    message = (
        f"there is no layout within {capacity:,} bytes: all were searched"
        if proven
        else f"no layout within {capacity:,} bytes in {time_limit:g} s: more "
        "time_limit may find one"
    )
    best = f"the lowest found takes {found.height:,} ({over:.2%} more)"
    return NoLayoutError(f"{message}; {best}", found, proven)
