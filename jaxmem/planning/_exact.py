"""The best order of up to 62 operations: a search over sets of operations done.

Is there an order with no more than P bytes? The bytes alive depend on the set of
operations done, not on their order, so the search goes over sets that can be done first
(order ideals), those of k operations in the k-th layer, all of a layer at once in numpy.
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
adds. A graph can be narrow one way and wide the other; both are tried, with ever more
sets allowed.

Not optimal where the sets of a layer are cut to `width`, the lowest first (a beam);
then nothing is proven, and it says so.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxmem.planning._pieces import Pieces

LARGEST = 62  # operations: a set is a 64-bit number
CHUNK = 1 << 18  # sets that are worked on at a time


@dataclass(frozen=True)
class Searched:
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
class Solved:
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
    problem: Pieces,
    order: Sequence[int],
    bound: int,
    *,
    until: float = float("inf"),
    sizes: Sequence[int] = SIZES,
) -> Solved:
    """The best order, or the best that was found.

    Args:
      problem: of at most 62 operations.
      order: one to start from.
      bound: bytes that every order has alive at some time.
      until: when to stop, by `time.monotonic`.
      sizes: how many sets may be looked at forward, then backward, before both are
        tried again with the next number.

    Returns:
      `Solved`; optimal if `peak == bound`.
    """
    best = Solved(tuple(order), problem.peak(order), bound)
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


Ways = Sequence[tuple[Pieces, int]]  # problems, and the step that puts orders right


def _either(
    ways: Ways, limit: int, sizes: Sequence[int], until: float
) -> Searched | None:
    """A search that came to an end, one way or the other."""
    for size in sizes:
        for problem, step in ways:
            found = search(problem, limit, sets=size, until=until)
            if found.order is not None:
                return replace(found, order=found.order[::step])
            if found.complete:
                return found
    return None


def _beam(ways: Ways, best: Solved, until: float) -> Solved:
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
    problem: Pieces,
    limit: int,
    *,
    sets: int = SIZES[-1],
    width: int | None = None,
    until: float = float("inf"),
) -> Searched:
    """An order with at most `limit` bytes alive.

    Args:
      problem: of at most 62 operations.
      limit: bytes.
      sets: how many sets may be looked at.
      width: how many sets a layer may have; None is all.
      until: when to stop, by `time.monotonic`.

    Returns:
      `Searched`.
    """
    operations = _operations(problem)
    layer, live = np.zeros(1, np.uint64), np.array([problem.base], np.int64)
    layers, seen, complete, blocked = [layer], 1, True, np.iinfo(np.int64).max
    for _ in range(len(problem)):
        parts = []
        for at in range(0, len(layer), CHUNK):
            part = _Layer(layer[at : at + CHUNK], live[at : at + CHUNK], limit)
            parts += _merged(part.next(operations))
            blocked = min(blocked, part.blocked)
            if time.monotonic() > until:
                return Searched(None, False, int(blocked), seen)
        if not parts:
            return Searched(None, complete, int(blocked), seen)
        ((layer, live),) = _merged(parts)
        if width and len(layer) > width:
            kept = np.sort(np.argsort(live, kind="stable")[:width])
            layer, live, complete = layer[kept], live[kept], False
        layers.append(layer)
        seen += len(layer)
        if seen > sets:
            return Searched(None, False, int(blocked), seen)
    return Searched(_path(operations, problem, layers, limit), complete, limit, seen)


def _merged(parts: list[tuple[np.ndarray, np.ndarray]]) -> list:
    """Every set once, in order: one pair of arrays, or none."""
    if not parts:
        return []
    sets, first = np.unique(np.concatenate([p[0] for p in parts]), return_index=True)
    return [(sets, np.concatenate([p[1] for p in parts])[first])]


@dataclass(frozen=True)
class _Change:
    """A piece that an operation brings or ends, as sets.

    It changes if all of `done` are done, and none of `undone` or not all of `waits`.
    """

    size: int
    done: np.uint64
    undone: np.uint64
    waits: np.uint64
    any_of: np.uint64
    piece: int

    def happens(self, sets: np.ndarray) -> np.ndarray | bool:
        found: np.ndarray | bool = True
        if self.done:
            found = found & ((sets & self.done) == self.done)
        if self.undone:
            found = found & ((sets & self.undone) == 0)
        if self.waits:
            found = found & ((sets & self.waits) != self.waits)
        if self.any_of:
            found = found & ((sets & self.any_of) != 0)
        return found


@dataclass(frozen=True)
class _Step:
    """An operation, as sets."""

    bit: np.uint64
    before: np.uint64
    extra: int
    brings: tuple[_Change, ...]
    ends: tuple[_Change, ...]
    over: tuple[tuple[int, int, int], ...]

    def ready(self, sets: np.ndarray) -> np.ndarray:
        """Places of the sets after which it can be done."""
        return np.flatnonzero((sets & (self.bit | self.before)) == self.before)

    def cost(self, sets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bytes more while it runs, and after it, for each set."""
        during = np.full(len(sets), self.extra, np.int64)
        after = np.zeros(len(sets), np.int64)
        changed = {}
        for change in self.brings:
            happens = change.happens(sets)
            after += change.size * happens
            changed[change.piece] = happens
        during += after
        for change in self.ends:
            happens = change.happens(sets)
            after -= change.size * happens
            changed[change.piece] = happens
        if self.over:
            during -= _written_over(self.over, changed, len(sets))
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


def _operations(problem: Pieces) -> list[_Step]:
    """The operations as sets, twins in order."""
    steps = []
    twins = _twins(problem)
    for i in range(len(problem)):
        own = 1 << i
        before = _mask(problem.before[i]) | (1 << twins[i] if i in twins else 0)
        brings, ends = [], []
        for k in problem.brings[i]:
            p = problem.pieces[k]
            others = _mask(p.tails) & ~own
            brings.append(_change(p.size, undone=others, waits=_mask(p.heads), piece=k))
        for k in problem.ends[i]:
            p = problem.pieces[k]
            tails = _mask(p.tails)
            tails = 0 if tails & _mask(problem.before[i]) else tails
            done = _mask(p.heads) & ~own
            ends.append(_change(p.size, done=done, any_of=tails, piece=k))
        steps.append(
            _Step(
                np.uint64(own),
                np.uint64(before),
                problem.extra[i],
                tuple(brings),
                tuple(ends),
                tuple(problem.over[i]),
            )
        )
    return steps


def _change(size, piece, done=0, undone=0, waits=0, any_of=0) -> _Change:
    return _Change(size, *map(np.uint64, (done, undone, waits, any_of)), piece)


def _mask(operations: Sequence[int]) -> int:
    return sum(1 << i for i in operations)


def _twins(problem: Pieces) -> dict[int, int]:
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


def _sides(problem: Pieces, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return problem.pieces[k].tails, problem.pieces[k].heads


class _Layer:
    """Sets with as many operations done, and those that follow from them."""

    def __init__(self, sets: np.ndarray, live: np.ndarray, limit: int):
        self.sets, self.live, self.limit = sets, live, limit
        self.blocked = np.iinfo(np.int64).max  # the least that is above the limit

    def next(self, steps: Sequence[_Step]) -> list[tuple[np.ndarray, np.ndarray]]:
        """(sets, bytes alive) with one operation more; a set may come more than once."""
        settled = np.zeros(len(self.sets), bool)  # what is to be done next is known
        safe, others = [], []
        for step in steps:
            at = step.ready(self.sets)
            at = at[~settled[at]]
            if not len(at):
                continue
            during, after = step.cost(self.sets[at])
            during += self.live[at]
            fits = during <= self.limit
            falls = fits & (after <= 0)
            settled[at[falls]] = True
            safe.append(self._after(step, at[falls], after[falls]))
            rest = fits & ~falls
            others.append((step, at[rest], after[rest], at[~fits], during[~fits]))
        found = safe
        for step, at, after, stuck, during in others:
            free = ~settled[at]
            found.append(self._after(step, at[free], after[free]))
            high = during[~settled[stuck]]
            self.blocked = min(self.blocked, int(high.min(initial=self.blocked)))
        return [pair for pair in found if len(pair[0])]

    def _after(self, step: _Step, at, after) -> tuple[np.ndarray, np.ndarray]:
        return self.sets[at] | step.bit, self.live[at] + after


def _path(steps, problem: Pieces, layers, limit: int) -> tuple[int, ...]:
    """An order through the layers, found from the end."""
    done = int(layers[-1][0])
    order: list[int] = []
    for layer in reversed(layers[:-1]):
        for i, step in enumerate(steps):
            if not done >> i & 1:
                continue
            ago = np.array([done ^ (1 << i)], np.uint64)
            place = np.searchsorted(layer, ago[0])
            if (
                place == len(layer)
                or layer[place] != ago[0]
                or not len(step.ready(ago))
            ):
                continue
            during, _ = step.cost(ago)
            if _alive(problem, int(ago[0])) + int(during[0]) <= limit:
                order.append(i)
                done ^= 1 << i
                break
    return tuple(reversed(order))


def _alive(problem: Pieces, done: int) -> int:
    """Bytes alive when a set of operations has been done."""
    live = problem.base
    for p in problem.pieces:
        there = not p.tails or any(done >> i & 1 for i in p.tails)
        waits = not p.heads or any(not done >> i & 1 for i in p.heads)
        live += p.size * (int(there and waits) - int(not p.tails))
    return live
