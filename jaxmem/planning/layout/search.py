"""Offsets for buffers in one arena: dynamic storage allocation.

Finding the least height of the arena is NP-hard; the most bytes alive at once are a
lower bound, which a layout often reaches.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from jaxmem._checks import (
    check_callable,
    check_choice,
    check_float,
    check_int,
    wrong_type,
)
from jaxmem.planning.layout.arena import Layout, NoLayoutError, load_of
from jaxmem.planning.layout.buffers import SIZES, Buffer, check_buffers
from jaxmem.planning.layout.fit import place_in_order, simple_order
from jaxmem.planning.layout.improve import improve
from jaxmem.planning.layout.incumbent import least_height
from jaxmem.planning.layout.problem import LayoutProblem, make_problem


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
    """Searches for the lowest arena that holds the buffers.

    Without a capacity the layout is never higher than the lower of the two of
    `best_fit`.

    Args:
      buffers: the buffers to lay out.
      capacity: bytes of the arena; the first layout within is returned. Without a
        capacity the search goes on until the layout is optimal or time is up.
      alignment: bytes; of every buffer, in addition to its own.
      time_limit: seconds after which the best layout so far is returned; the first two
        layouts, those of `best_fit`, are always finished.
      long_lived: ids of buffers to place at the bottom, before all others, in one of
        the first layouts: for example the activations that a training step keeps for
        its backward pass. Long-lived buffers are also found without it.
      seed: of the random choices. The same seed gives the same layout if the search
        ends before the time limit.
      progress: called with the least height so far and the proven bound, in bytes.

    Returns:
      A `Layout`.

    Raises:
      ValueError: two buffers have the same id, more than `capacity` is alive at once,
        or an argument is out of range; the message says which.
      NoLayoutError: no layout within `capacity` was found in time, or there is none;
        its `best` is the lowest that was found.

    Source: for training steps ROAM (https://arxiv.org/abs/2310.19295, section 3.4).

    Example::

      from jaxmem.planning import Buffer

      buffers = [Buffer("a", 0, 2, 4), Buffer("b", 1, 3, 4), Buffer("c", 2, 4, 4)]
      print(jaxmem.planning.layout(buffers).height)
    """
    begin = time.monotonic()
    buffers = _aligned(_checked(buffers), alignment)
    time_limit = check_float("time_limit", time_limit, at_least=0, infinite=True)
    seed = check_int("seed", seed, 0)
    if capacity is not None:
        capacity = check_int("capacity", capacity, 0)
        _check_capacity(capacity, buffers)
    if progress is not None:
        check_callable("progress", progress, "a function, or None")
    problem, used = _arrays(buffers)
    first = _long_lived(long_lived, {b.id for b in buffers})
    unit = problem.unit
    offsets, bound = improve(
        problem,
        None if capacity is None else capacity // unit,
        np.array([buffers[i].id in first for i in used], bool),
        begin + time_limit,
        seed,
        lambda h, b: progress(h * unit, b * unit) if progress else None,
    )
    lowest = _layout(buffers, problem, used, offsets, bound, begin)
    if capacity is not None and lowest.height > capacity:
        raise _too_high(lowest, capacity, time_limit)
    return lowest


def best_fit(
    buffers: Iterable[Buffer],
    by: Literal["size", "lifetime"] = "size",
    *,
    alignment: int = 1,
) -> Layout:
    """Lays buffers out as XLA does: one after another, each in the tightest gap.

    XLA keeps the lower of the two layouts.

    Args:
      buffers: the buffers to lay out.
      by: which buffer comes first: the largest, or the one that lives longest.
      alignment: bytes; of every buffer, in addition to its own.

    Returns:
      A `Layout`.

    Raises:
      ValueError: two buffers have the same id, or another argument is invalid.
    """
    begin = time.monotonic()
    check_choice("by", by, ("size", "lifetime"))
    buffers = _aligned(_checked(buffers), alignment)
    problem, used = _arrays(buffers)
    offsets = place_in_order(problem, simple_order(problem, by))
    bound = least_height(problem)
    return _layout(buffers, problem, used, offsets, bound, begin)


def _check_capacity(capacity: int, buffers: tuple[Buffer, ...]) -> None:
    """ValueError for a capacity that is less than a lower bound seen at once."""
    largest = max(buffers, key=lambda b: b.size, default=None)
    if largest is not None and capacity < largest.size:
        raise ValueError(
            f"capacity={capacity:,} bytes is less than the {largest.size:,} bytes of "
            f"buffer {largest.id}"
        )
    load, moment = load_of(buffers)
    if capacity < load:
        raise ValueError(
            f"capacity={capacity:,} bytes is less than the {load:,} bytes "
            f"that are alive at time {moment}"
        )


def _checked(buffers: Iterable[Buffer]) -> tuple[Buffer, ...]:
    buffers = check_buffers(buffers)
    if sum(b.size for b in buffers) > SIZES[1]:
        raise ValueError("buffers: 2 EiB and more together is more than can be counted")
    return buffers


def _aligned(buffers: tuple[Buffer, ...], alignment: int) -> tuple[Buffer, ...]:
    """The buffers with an additional alignment; ValueError if int64 could overflow."""
    alignment = check_int("alignment", alignment, 1)
    common = [math.lcm(b.alignment, alignment) for b in buffers]
    # Each buffer may have to be moved up by its alignment.
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
    """The ids, checked: each is that of a buffer."""
    allowed = "a collection of ids of buffers"
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise wrong_type("long_lived", ids, allowed)
    ids = list(ids)
    for one in ids:
        if not isinstance(one, int | str):
            raise wrong_type("long_lived", ids, allowed)
        if one not in known:
            raise ValueError(f"long_lived: no buffer has the id {one!r}; {allowed}")
    return set(ids)


def _arrays(buffers: tuple[Buffer, ...]) -> tuple[LayoutProblem, list[int]]:
    """The problem, and the numbers of the buffers in it: those with a rectangle."""
    used = [i for i, b in enumerate(buffers) if next(b.rectangles(), None) is not None]
    return make_problem([buffers[i] for i in used]), used


def _layout(buffers, problem, used, offsets, bound, begin) -> Layout:
    """The layout in bytes; buffers that are never in use lie at offset 0."""
    offset_of = {b.id: 0 for b in buffers}
    for i, offset in zip(used, (offsets * problem.unit).tolist(), strict=True):
        offset_of[buffers[i].id] = offset
    # A buffer that gaps cover wholly still has to fit into the arena.
    bound = max(int(bound) * problem.unit, max((b.size for b in buffers), default=0))
    return Layout(buffers, offset_of, bound, time.monotonic() - begin)


def _too_high(lowest: Layout, capacity: int, time_limit: float) -> NoLayoutError:
    proven = lowest.lower_bound > capacity
    over = lowest.height / capacity - 1
    message = (
        f"there is no layout within {capacity:,} bytes: all were searched"
        if proven
        else f"no layout within {capacity:,} bytes in {time_limit:g} s: more "
        "time_limit may find one"
    )
    best = f"the lowest found takes {lowest.height:,} ({over:.2%} more)"
    return NoLayoutError(f"{message}; {best}", lowest, proven)
