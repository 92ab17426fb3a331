"""The best order of some dozens of operations: a search over sets of operations done.

Is there an order with no more than P bytes? The bytes alive depend on the set of
operations done, not on their order, so the search goes over sets that can be done
first (order ideals), those of k operations in the k-th layer, a layer at once in numpy.
P goes up from a proven bound until there is an order, so what is found is the optimum.

Two rules make it small, and neither loses the optimum:

- An operation that fits (no more than P alive while it runs) and leaves no more alive
  than before is done at once. The bytes alive are submodular: done earlier or later, it
  adds at most what it adds now, so pulling it to the front of any order raises no other
  state; nor does it take from another operation a place to write in, since more are
  done when that runs.
- Twins, which read the same pieces and make alike ones for the same readers, are done
  in the order of their numbers.

The same search runs backward from the end, where the first rule puts off what only
adds. (What is put off may keep a value from being written over; but then it is what
frees that value, and no write saves more than that.) A graph can be narrow one way and
wide the other; both are tried, with ever more sets allowed.

Not optimal where the sets of a layer are cut to `width`, the lowest first (a beam);
then nothing is proven, and it says so.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxmem.planning._live_ranges import OrderProblem

WORD = 64  # operations in a word of a set
CHUNK = 1 << 18  # sets that are worked on at a time


@dataclass(frozen=True)
class LimitedOrder:
    """What a search for an order under a limit came to.

    Attributes:
      order: the operations; None if there is none, or none was found.
      complete: whether all sets were looked at: without an order there is none.
      next: the least bytes that would let the search go on; a proven bound if it was
        complete and found no order.
      sets: how many were looked at.
    """

    order: tuple[int, ...] | None
    complete: bool
    next: int
    sets: int


@dataclass(frozen=True)
class SolvedOrder:
    """An order and what is known of the optimum.

    Attributes:
      order: the operations.
      peak: its bytes.
      bound: no order has fewer.
    """

    order: tuple[int, ...]
    peak: int
    bound: int


SIZES = (3_000, 100_000, 3_000_000, 40_000_000)  # sets before the other way is tried
WIDTH = 1_000  # sets a layer of a beam
HALVES = 6  # limits that a beam is tried under


def solve(
    problem: OrderProblem,
    order: Sequence[int],
    bound: int,
    *,
    until: float = float("inf"),
    sizes: Sequence[int] = SIZES,
) -> SolvedOrder:
    """The best order, or the best that was found.

    Args:
      problem: the operations.
      order: one to start from.
      bound: bytes that every order has alive at some time.
      until: when to stop, by `time.monotonic`.
      sizes: how many sets may be looked at forward, then backward, before both are
        tried again with the next number.

    Returns:
      `SolvedOrder`; optimal if `peak == bound`.
    """
    best = SolvedOrder(tuple(order), problem.peak(order), bound)
    ways = ((problem, 1), (problem.reversed, -1))
    aims, beamed = 0, False
    while best.bound < best.peak:
        # First from the bound up, where a search is small, then by halves.
        limit = best.bound + (0 if aims < 3 else (best.peak - best.bound) // 2)
        found = _either(ways, limit, sizes[:2], until)
        if found is None and not beamed:
            best, beamed = _beam(ways, best, until), True
            continue
        found = found or _either(ways, limit, sizes[2:], until)
        if found is None:
            break
        aims += 1
        if found.order is None:
            best = replace(best, bound=min(found.next, best.peak))
        else:
            best = replace(best, order=found.order, peak=problem.peak(found.order))
    return best


Ways = Sequence[
    tuple[OrderProblem, int]
]  # problems, and the step that puts orders right


def _either(
    ways: Ways, limit: int, sizes: Sequence[int], until: float
) -> LimitedOrder | None:
    """A search that came to an end, one way or the other."""
    for size in sizes:
        for problem, step in ways:
            found = search(problem, limit, sets=size, until=until)
            if found.order is not None:
                return replace(found, order=found.order[::step])
            if found.complete:
                return found
    return None


def _beam(ways: Ways, best: SolvedOrder, until: float) -> SolvedOrder:
    """What searches with narrow layers find, under limits that halve the gap."""
    for problem, step in ways:
        low = best.bound
        for _ in range(HALVES):
            limit = (low + best.peak) // 2
            if limit >= best.peak:
                break
            found = search(problem, limit, width=WIDTH, until=until)
            if found.order is None:
                low = limit + 1
            else:
                peak = problem.peak(found.order)
                best = replace(best, order=found.order[::step], peak=peak)
    return best


def search(
    problem: OrderProblem,
    limit: int,
    *,
    sets: int = SIZES[-1],
    width: int | None = None,
    until: float = float("inf"),
) -> LimitedOrder:
    """An order with at most `limit` bytes alive.

    Args:
      problem: the operations.
      limit: bytes.
      sets: how many sets may be looked at.
      width: how many sets a layer may have; None is all.
      until: when to stop, by `time.monotonic`.

    Returns:
      `LimitedOrder`.
    """
    steps = _steps(problem)
    layer = _first(problem)
    trace: list[_IdealLayer] = []
    seen, complete, blocked = 1, True, int(np.iinfo(np.int64).max)
    for _ in steps:
        parts = []
        possible = _possible(layer, steps)
        for start in range(0, len(layer.live), CHUNK):
            found, least = _following(layer, start, possible, limit)
            parts += found
            blocked = min(blocked, least)
            if time.monotonic() > until:
                return LimitedOrder(None, False, blocked, seen)
        if not parts:
            return LimitedOrder(None, complete, blocked, seen)
        layer = _merged(parts)
        if width and len(layer.live) > width:
            kept = np.sort(np.argsort(layer.live, kind="stable")[:width])
            layer, complete = layer.at(kept), False
        trace.append(layer.without_sets())
        seen += len(layer.live)
        if seen > sets:
            return LimitedOrder(None, False, blocked, seen)
    return LimitedOrder(_path(trace), complete, limit, seen)


# A set of operations as the words in which it has bits; sets are words by sets.
Mask = tuple[tuple[int, np.uint64], ...]


def _mask(operations: Iterable[int]) -> Mask:
    words: dict[int, int] = {}
    for i in operations:
        words[i // WORD] = words.get(i // WORD, 0) | 1 << i % WORD
    return tuple((word, np.uint64(bits)) for word, bits in words.items())


def _all(sets: np.ndarray, mask: Mask) -> np.ndarray | bool:
    """Which sets have all of it."""
    found: Any = True
    for word, bits in mask:
        found = found & ((sets[word] & bits) == bits)
    return found


def _none(sets: np.ndarray, mask: Mask) -> np.ndarray | bool:
    """Which sets have nothing of it."""
    found: Any = True
    for word, bits in mask:
        found = found & ((sets[word] & bits) == 0)
    return found


def _number(words: np.ndarray) -> int:
    """A set as a number with its bits."""
    return int.from_bytes(words.astype("<u8").tobytes(), "little")


@dataclass(frozen=True)
class _IdealLayer:
    """Sets with as many operations done, and how they came about.

    Attributes:
      sets: words by sets.
      live: bytes alive, of each.
      parent: the place of the set before it in the layer before.
      last: the operation done since.
    """

    sets: np.ndarray
    live: np.ndarray
    parent: np.ndarray
    last: np.ndarray

    def at(self, places: np.ndarray) -> "_IdealLayer":
        """Some of the sets."""
        return _IdealLayer(
            self.sets[:, places],
            self.live[places],
            self.parent[places],
            self.last[places],
        )

    def without_sets(self) -> "_IdealLayer":
        """What is kept to find the way back."""
        return replace(self, sets=self.sets[:, :0], live=self.live[:0])


def _first(problem: OrderProblem) -> _IdealLayer:
    """Nothing done."""
    nothing = np.zeros((-(-len(problem) // WORD), 1), np.uint64)
    none = np.zeros(1, np.int32)
    return _IdealLayer(nothing, np.array([problem.base], np.int64), none, none)


def _merged(parts: Sequence[_IdealLayer]) -> _IdealLayer:
    """Every set once."""
    whole = _IdealLayer(
        np.concatenate([p.sets for p in parts], axis=1),
        np.concatenate([p.live for p in parts]),
        np.concatenate([p.parent for p in parts]),
        np.concatenate([p.last for p in parts]),
    )
    if len(whole.sets) == 1:
        return whole.at(np.unique(whole.sets[0], return_index=True)[1])
    order = np.lexsort(whole.sets)
    ordered = whole.sets[:, order]
    new = np.append(True, (ordered[:, 1:] != ordered[:, :-1]).any(axis=0))
    return whole.at(order[new])


def _path(trace: Sequence[_IdealLayer]) -> tuple[int, ...]:
    """The operations that led to the only set of the last layer."""
    order, place = [], 0
    for layer in reversed(trace):
        order.append(int(layer.last[place]))
        place = int(layer.parent[place])
    return tuple(reversed(order))


def _following(
    layer: _IdealLayer, start: int, steps: Sequence["_SetOperation"], limit: int
) -> tuple[list[_IdealLayer], int]:
    """What follows from a chunk of a layer, and the least bytes above the limit."""
    sets = layer.sets[:, start : start + CHUNK]
    live = layer.live[start : start + CHUNK]
    settled = np.zeros(len(live), bool)  # what is to be done next is known
    blocked = int(np.iinfo(np.int64).max)

    def done(step: _SetOperation, at: np.ndarray, after: np.ndarray) -> _IdealLayer:
        new = sets[:, at]
        new[step.operation // WORD] |= np.uint64(1 << step.operation % WORD)
        last = np.full(len(at), step.operation, np.int16)
        return _IdealLayer(new, live[at] + after, (at + start).astype(np.int32), last)

    found, others = [], []
    for step in steps:
        at = step.ready(sets)
        at = at[~settled[at]]
        if not len(at):
            continue
        during, after = step.cost(sets[:, at])
        during += live[at]
        fits = during <= limit
        falls = fits & (after <= 0)
        settled[at[falls]] = True
        found.append(done(step, at[falls], after[falls]))
        rest = fits & ~falls
        others.append((step, at[rest], after[rest], at[~fits], during[~fits]))
    for step, at, after, stuck, during in others:
        free = ~settled[at]
        found.append(done(step, at[free], after[free]))
        high = during[~settled[stuck]]
        blocked = min(blocked, int(high.min(initial=blocked)))
    found = [part for part in found if len(part.live)]
    return [_merged(found)] if found else [], blocked


def _possible(
    layer: _IdealLayer, steps: Sequence["_SetOperation"]
) -> list["_SetOperation"]:
    """What can be next after some of the sets; nearly all steps cannot."""
    some = _number(np.bitwise_or.reduce(layer.sets, axis=1))
    every = _number(np.bitwise_and.reduce(layer.sets, axis=1))
    return [s for s in steps if not every >> s.operation & 1 and not s.needs & ~some]


@dataclass(frozen=True)
class _RangeChange:
    """A piece that an operation brings or ends, and when it does, as sets.

    All of `done` are done, none of `undone`, not all of `waits`, some of `any_of`; an
    empty set asks for nothing.
    """

    piece: int
    size: int
    done: Mask = ()
    undone: Mask = ()
    waits: Mask = ()
    any_of: Mask = ()

    def happens(self, sets: np.ndarray) -> np.ndarray | bool:
        """After which sets it does."""
        found: Any = _all(sets, self.done) & _none(sets, self.undone)
        if self.waits:
            found = found & ~_all(sets, self.waits)
        if self.any_of:
            found = found & ~_none(sets, self.any_of)
        return found


@dataclass(frozen=True)
class _SetOperation:
    """An operation, as sets."""

    operation: int
    needs: int  # what must come before, as one number
    own: Mask
    before: Mask
    extra: int
    brings: tuple[_RangeChange, ...]
    ends: tuple[_RangeChange, ...]
    over: tuple[tuple[int, int, int], ...]

    def ready(self, sets: np.ndarray) -> np.ndarray:
        """Places of the sets after which it can be done."""
        return np.flatnonzero(_none(sets, self.own) & _all(sets, self.before))

    def cost(self, sets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bytes more while it runs, and after it, for each set."""
        count = sets.shape[1]
        during = np.full(count, self.extra, np.int64)
        after = np.zeros(count, np.int64)
        changed = {}
        for change in self.brings:
            changed[change.piece] = happens = change.happens(sets)
            after += change.size * happens
        during += after
        for change in self.ends:
            changed[change.piece] = happens = change.happens(sets)
            after -= change.size * happens
        if self.over:
            during -= _written_over(self.over, changed, count)
        return during, after


def _written_over(over, changed, n: int) -> np.ndarray:
    """`written_over` for many sets at once; the pairs come with most bytes first."""
    saved = np.zeros(n, np.int64)
    taken: dict[tuple[str, int], np.ndarray] = {}
    for size, output, piece in over:
        if piece not in changed:
            continue
        free = np.broadcast_to(changed[piece], n).copy()
        for key in (("output", output), ("piece", piece)):
            free &= ~taken.get(key, np.zeros(n, bool))
        for key in (("output", output), ("piece", piece)):
            taken[key] = taken.get(key, False) | free
        saved += size * free
    return saved


def _steps(problem: OrderProblem) -> list[_SetOperation]:
    """The operations as sets, twins in order."""
    steps, twins = [], _twins(problem)
    for i in range(len(problem)):
        before = set(problem.before[i])
        brings, ends = [], []
        for k in problem.brings[i]:
            p = problem.pieces[k]
            heads = () if set(problem.after[i]) & set(p.heads) else p.heads
            others = (j for j in p.tails if j != i)
            brings.append(
                _RangeChange(k, p.size, undone=_mask(others), waits=_mask(heads))
            )
        for k in problem.ends[i]:
            p = problem.pieces[k]
            tails = () if before & set(p.tails) else p.tails
            others = (j for j in p.heads if j != i)
            ends.append(
                _RangeChange(k, p.size, done=_mask(others), any_of=_mask(tails))
            )
        if i in twins:
            before.add(twins[i])
        steps.append(
            _SetOperation(
                i,
                sum(1 << j for j in before),
                _mask([i]),
                _mask(before),
                problem.extra[i],
                tuple(brings),
                tuple(ends),
                tuple(problem.over[i]),
            )
        )
    return steps


def _twins(problem: OrderProblem) -> dict[int, int]:
    """Operation -> the one before it that could change places with it."""

    def own(k: int, alone: tuple[int, ...], others: tuple[int, ...]) -> tuple:
        return (problem.pieces[k].size, others) if len(alone) == 1 else (k,)

    last, found = {}, {}
    for i in range(len(problem)):
        sides = {k: own(k, *_sides(problem, k)) for k in problem.brings[i]}
        ends = {k: own(k, *_sides(problem, k)[::-1]) for k in problem.ends[i]}
        key = (
            tuple(problem.before[i]),
            tuple(problem.after[i]),
            problem.extra[i],
            tuple(sorted(sides.values(), key=str)),
            tuple(sorted(ends.values(), key=str)),
            tuple((*p[:2], (sides | ends).get(p[2])) for p in problem.over[i]),
        )
        if key in last:
            found[i] = last[key]
        last[key] = i
    return found


def _sides(problem: OrderProblem, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return problem.pieces[k].tails, problem.pieces[k].heads
