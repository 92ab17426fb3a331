"""Sets of operations that may have run (order ideals), a layer of equal size at once.

Two rules keep the layers small, and neither loses the optimum: an operation that fits
and leaves no more alive than before runs at once, and interchangeable operations run in
the order of their numbers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxmem.planning._bitsets import bitset
from jaxmem.planning._live_ranges import OrderProblem

WORD = 64  # operations in a word of a set
UNBLOCKED = int(np.iinfo(np.int64).max)  # bytes: nothing was above the limit

# A set of operations as the words in which it has bits. Many sets are an array of
# (words, sets).
Mask = tuple[tuple[int, np.uint64], ...]


def _mask(operations: Iterable[int]) -> Mask:
    words: dict[int, int] = {}
    for i in operations:
        words[i // WORD] = words.get(i // WORD, 0) | 1 << i % WORD
    return tuple((word, np.uint64(bits)) for word, bits in words.items())


def _all(sets: np.ndarray, mask: Mask) -> np.ndarray | bool:
    """Which sets have all of the mask."""
    hits: Any = True
    for word, bits in mask:
        hits = hits & ((sets[word] & bits) == bits)
    return hits


def _none(sets: np.ndarray, mask: Mask) -> np.ndarray | bool:
    """Which sets have nothing of the mask."""
    hits: Any = True
    for word, bits in mask:
        hits = hits & ((sets[word] & bits) == 0)
    return hits


def _integer(words: np.ndarray) -> int:
    """A set as a Python integer."""
    return int.from_bytes(words.astype("<u8").tobytes(), "little")


class IdealLayer(NamedTuple):
    """Sets of equally many operations, and how each came about."""

    sets: np.ndarray  # (words, sets) bits
    live: np.ndarray  # bytes alive after each set
    parent: np.ndarray  # the place, in the layer before, of the set each comes from
    last: np.ndarray  # the operation that was added to the parent

    def at(self, places: np.ndarray) -> "IdealLayer":
        """Some of the sets."""
        return IdealLayer(*(column[..., places] for column in self))

    def without_sets(self) -> "IdealLayer":
        """What is stored to trace an order back; the sets would take most memory."""
        return self._replace(sets=self.sets[:, :0], live=self.live[:0])


def empty_layer(problem: OrderProblem) -> IdealLayer:
    """The layer of the empty set."""
    nothing = np.zeros((-(-len(problem) // WORD), 1), np.uint64)
    zero = np.zeros(1, np.int32)
    return IdealLayer(nothing, np.array([problem.base], np.int64), zero, zero)


def merged(layers: Sequence[IdealLayer]) -> IdealLayer:
    """One layer with every set once."""
    columns = zip(*layers, strict=True)
    whole = IdealLayer(*(np.concatenate(column, axis=-1) for column in columns))
    if len(whole.sets) == 1:
        return whole.at(np.unique(whole.sets[0], return_index=True)[1])
    order = np.lexsort(whole.sets)
    ordered = whole.sets[:, order]
    new = np.append(True, (ordered[:, 1:] != ordered[:, :-1]).any(axis=0))
    return whole.at(order[new])


def following(
    layer: IdealLayer,  # sets of k operations
    start: int,  # the first set to expand
    count: int,  # how many sets to expand
    operations: Sequence["SetOperation"],  # those that may run next
    limit: int,  # bytes
) -> tuple[list[IdealLayer], int]:
    """The sets that follow from a part of a layer, and what blocked the others."""
    sets = layer.sets[:, start : start + count]
    live = layer.live[start : start + count]
    settled = np.zeros(len(live), bool)  # sets whose next operation is decided
    blocked = UNBLOCKED

    def extended(step: SetOperation, at: np.ndarray, after: np.ndarray) -> IdealLayer:
        new = sets[:, at]
        new[step.operation // WORD] |= np.uint64(1 << step.operation % WORD)
        last = np.full(len(at), step.operation, np.int16)
        return IdealLayer(new, live[at] + after, (at + start).astype(np.int32), last)

    layers, others = [], []
    for step in operations:
        at = step.ready(sets)
        at = at[~settled[at]]
        if not len(at):
            continue
        during, after = step.cost(sets[:, at])
        during += live[at]
        fits = during <= limit
        # Earlier or later, an operation adds at most what it adds now, so pulling it to
        # the front of any order raises no other set's bytes. Nor does it take an input
        # to overwrite from another one, since more has run when that one comes.
        falls = fits & (after <= 0)
        settled[at[falls]] = True
        layers.append(extended(step, at[falls], after[falls]))
        rest = fits & ~falls
        others.append((step, at[rest], after[rest], at[~fits], during[~fits]))
    for step, at, after, stuck, during in others:
        free = ~settled[at]
        layers.append(extended(step, at[free], after[free]))
        high = during[~settled[stuck]]
        blocked = min(blocked, int(high.min(initial=blocked)))
    layers = [each for each in layers if len(each.live)]
    return [merged(layers)] if layers else [], blocked


def possible(
    layer: IdealLayer, operations: Sequence["SetOperation"]
) -> list["SetOperation"]:
    """The operations that can run after some of the sets; most of them cannot."""
    some = _integer(np.bitwise_or.reduce(layer.sets, axis=1))
    every = _integer(np.bitwise_and.reduce(layer.sets, axis=1))
    return [
        s for s in operations if not every >> s.operation & 1 and not s.needs & ~some
    ]


@dataclass(frozen=True)
class _RangeChange:
    """A live range that an operation starts or ends, and after which sets it does."""

    live_range: int
    size: int
    # The operations that must have run, or not; an empty mask is no condition.
    done: Mask = ()
    undone: Mask = ()
    not_all_of: Mask = ()
    any_of: Mask = ()

    def happens(self, sets: np.ndarray) -> np.ndarray | bool:
        hits: Any = _all(sets, self.done) & _none(sets, self.undone)
        if self.not_all_of:
            hits = hits & ~_all(sets, self.not_all_of)
        if self.any_of:
            hits = hits & ~_none(sets, self.any_of)
        return hits


@dataclass(frozen=True)
class SetOperation:
    """An operation in terms of sets."""

    operation: int  # its number
    needs: int  # the operations that must have run, as a Python integer
    itself: Mask  # the operation as a mask
    before: Mask  # `needs` as a mask
    scratch: int  # bytes that it holds only while it runs
    starts: tuple[_RangeChange, ...]  # the live ranges that it may start
    ends: tuple[_RangeChange, ...]  # the live ranges that it may end
    overwrites: tuple[tuple[int, int, int], ...]  # as in `OrderProblem`

    def ready(self, sets: np.ndarray) -> np.ndarray:
        """Places of the sets after which it can run."""
        return np.flatnonzero(_none(sets, self.itself) & _all(sets, self.before))

    def cost(self, sets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Additional bytes while it runs, and after it, for each set."""
        count = sets.shape[1]
        during = np.full(count, self.scratch, np.int64)
        after = np.zeros(count, np.int64)
        changed = {}
        for change in self.starts:
            changed[change.live_range] = happens = change.happens(sets)
            after += change.size * happens
        during += after
        for change in self.ends:
            changed[change.live_range] = happens = change.happens(sets)
            after -= change.size * happens
        if self.overwrites:
            during -= _overwritten_bytes(self.overwrites, changed, count)
        return during, after


def _overwritten_bytes(pairs, changed, n: int) -> np.ndarray:
    """`overwritten_bytes` for n sets at once; the pairs come with most bytes first."""
    saved = np.zeros(n, np.int64)
    taken: dict[tuple[str, int], np.ndarray] = {}
    for size, output, live_range in pairs:
        if live_range not in changed:
            continue
        free = np.broadcast_to(changed[live_range], n).copy()
        keys = ("output", output), ("range", live_range)
        for key in keys:
            free &= ~taken.get(key, np.zeros(n, bool))
        for key in keys:
            taken[key] = taken.get(key, False) | free
        saved += size * free
    return saved


def set_operations(problem: OrderProblem) -> list[SetOperation]:
    """The operations in terms of sets, interchangeable ones in order."""
    operations, earlier = [], _interchangeable(problem)
    for i in range(len(problem)):
        before = set(problem.before[i])
        starts, ends = [], []
        for k in problem.started_by[i]:
            r = problem.ranges[k]
            # An end that comes after `i` anyway has not run: no need to ask.
            rest = () if set(problem.after[i]) & set(r.ends) else r.ends
            others = _mask(j for j in r.starts if j != i)
            starts.append(
                _RangeChange(k, r.size, undone=others, not_all_of=_mask(rest))
            )
        for k in problem.ended_by[i]:
            r = problem.ranges[k]
            first = () if before & set(r.starts) else r.starts
            others = _mask(j for j in r.ends if j != i)
            ends.append(_RangeChange(k, r.size, done=others, any_of=_mask(first)))
        if i in earlier:
            before.add(earlier[i])
        operations.append(
            SetOperation(
                i,
                bitset(before),
                _mask([i]),
                _mask(before),
                problem.scratch[i],
                tuple(starts),
                tuple(ends),
                tuple(problem.overwrites[i]),
            )
        )
    return operations


def _interchangeable(problem: OrderProblem) -> dict[int, int]:
    """Operation -> the last one before it that could change places with it."""

    def name(k: int, mine: tuple[int, ...], others: tuple[int, ...]) -> tuple:
        # A range with `i` alone on its side is known by its size and its other side.
        return (problem.ranges[k].size, others) if len(mine) == 1 else (k,)

    last, earlier = {}, {}
    for i in range(len(problem)):
        ranges = problem.ranges
        starts = {
            k: name(k, ranges[k].starts, ranges[k].ends) for k in problem.started_by[i]
        }
        ends = {
            k: name(k, ranges[k].ends, ranges[k].starts) for k in problem.ended_by[i]
        }
        key = (
            tuple(problem.before[i]),
            tuple(problem.after[i]),
            problem.scratch[i],
            tuple(sorted(starts.values(), key=str)),
            tuple(sorted(ends.values(), key=str)),
            tuple((*p[:2], (starts | ends).get(p[2])) for p in problem.overwrites[i]),
        )
        if key in last:
            earlier[i] = last[key]
        last[key] = i
    return earlier
