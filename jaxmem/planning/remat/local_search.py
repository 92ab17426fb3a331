"""Recomputation by small steps: repeats what frees most bytes for its cost.

The search is greedy: it never judges a run together with the next one, which is what
the plans of `chain` are for.
"""

import bisect
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxmem.planning.remat.sequence import SequenceEvents, SequenceTables, repeats

TRIED = 12  # runs evaluated in a step
ALIKE = 1.05  # runs whose scores differ by a smaller factor are inserted together
HALF = 0.5  # of their estimated gain, that runs together must bring
NOISE = 0.4  # standard deviation of the logarithm of a score's random factor
IDLE = 40  # rounds of `refine` in a row without a gain
PATIENCE = 150  # runs that may fail on the way to a target
ABOVE = 1e-9  # relative: a smaller gain is rounding
SHORT = 0.05  # duration of a repeat relative to a first run


@dataclass(frozen=True)
class EvaluatedSequence:
    """A sequence, its bytes, and the cost of its repeats."""

    events: SequenceEvents
    cost: float

    @property
    def sequence(self) -> np.ndarray:
        return self.events.sequence

    @property
    def peak(self) -> int:
        return self.events.peak


class RematSearch:
    """Searches for sequences of one graph."""

    def __init__(
        self,
        tables: SequenceTables,  # the graph
        cost: np.ndarray,  # (operations,) of each, in seconds or the caller's unit
        report: Callable[[EvaluatedSequence], None],  # told of every sequence
        deadline: float = math.inf,  # of `time.monotonic()`, for every search
    ):
        self.tables, self.cost, self._report = tables, cost, report
        self._deadline = deadline
        self._random: np.random.Generator | None = None  # varies which run comes first
        self.work = 0.0  # the effort so far, in about a quarter of a millisecond

    def chance(self) -> float:
        """A random factor around 1 in every other round of `refine`, else 1."""
        if self._random is None:
            return 1.0
        return math.exp(NOISE * float(self._random.standard_normal()))

    def late(self) -> bool:
        return time.monotonic() > self._deadline

    def state(self, sequence: np.ndarray) -> EvaluatedSequence:
        """Evaluates a sequence."""
        self.work += 0.2 + len(sequence) / 1000
        repeated = np.bincount(sequence, minlength=len(self.cost)) - 1
        state = EvaluatedSequence(
            self.tables.events(sequence), float(repeated @ self.cost)
        )
        self._report(state)
        return state

    def lower(
        self,
        state: EvaluatedSequence,
        target: float,
        longest: float = math.inf,  # a longer sequence is returned as it is
        most: float = math.inf,  # so is one that costs more
        work: float = math.inf,  # the effort to spend at most, in units of `work`
    ) -> EvaluatedSequence:
        """Inserts repeats until the peak is at most `target`, or none helps."""
        refused, end = set(), self.work + work
        while (
            state.peak > target
            and len(refused) < PATIENCE
            and len(state.sequence) <= longest
            and state.cost <= most
            and self.work < end
            and not self.late()
        ):
            better = self._step(state, target, refused)
            if better is None:
                return state
            state = better
        return state

    def _step(
        self, state: EvaluatedSequence, target: float, refused
    ) -> EvaluatedSequence | None:
        above = _above(state, target)
        while runs := _runs(self, state, target, refused):
            together = _together(runs, above)
            if len(together) > 1:
                after = self._better(state, together, target, above, HALF)
                if after is not None:
                    return after
            for run in runs:
                after = self._better(state, [run], target, above)
                if after is None and run.later:
                    bare = replace(run, later=())
                    after = self._better(state, [bare], target, above)
                if after is not None:
                    return after
                refused.add(run.key)
        return None

    def _better(
        self, state, runs, target, above, fraction: float = 0.0
    ) -> EvaluatedSequence | None:
        """The state with these runs, if it is lower by that fraction of their gain."""
        after = self.state(_with_runs(state.sequence, runs))
        gain = max(fraction * sum(r.gain for r in runs), above * ABOVE)
        if _above(after, target) >= above - gain:
            return None
        return after if after.peak <= max(state.peak, target) else None

    def cheapen(self, state: EvaluatedSequence, target: float) -> EvaluatedSequence:
        """Removes the most expensive repeats while the peak stays within `target`."""
        needed: set[tuple[int, int]] = set()
        many = 1  # repeats removed at a time: doubled on success, halved on failure
        while not self.late():
            places = _removable(self.tables, state, self.cost, target)
            names = zip(*_occurrences(state.sequence, places), strict=True)
            left = [x for x in zip(places, names, strict=True) if x[1] not in needed]
            if not left:
                break
            gone = [p for p, _ in left[:many]]
            without = self.state(np.delete(state.sequence, gone))
            if without.peak <= target:
                state, many = without, 2 * many
            elif len(gone) == 1:
                needed.add(left[0][1])
            else:
                many = len(gone) // 2
        return state

    def refine(
        self, state: EvaluatedSequence, target: float, work: float, seed: int
    ) -> EvaluatedSequence:
        """Removes some repeats at random, then lowers and cheapens what is left."""
        random, end, idle = np.random.default_rng(seed), self.work + work, 0
        while self.work < end and idle < IDLE and not self.late():
            places = repeats(state.sequence)
            if len(places) == 0 or state.peak > target:
                break
            few = min(len(places), int(random.integers(1, 5)))
            if random.random() < 0.5:  # neighbours, which often belong together
                start = random.integers(0, len(places) - few + 1)
                gone = places[start : start + few]
            else:
                gone = random.choice(places, few, replace=False)
            other = self.state(np.delete(state.sequence, gone))
            self._random = random if idle % 2 else None
            other = self.lower(other, target, most=1.1 * state.cost)
            self._random = None
            if other.peak <= target:
                other = self.cheapen(other, target)
            idle += 1
            if other.peak <= target and other.cost <= state.cost:
                idle = 0 if other.cost < state.cost else idle
                state = other
        return state


def _above(state: EvaluatedSequence, target: float) -> float:
    """Byte-time above the target, in which a repeat is a short time."""
    excess = np.maximum(state.events.profile - target, 0)
    in_repeats = float(excess[repeats(state.sequence)].sum())
    return float(excess.sum()) - (1 - SHORT) * in_repeats


def _occurrences(sequence: np.ndarray, places) -> tuple[list[int], list[int]]:
    """The operations at these places, and how often each ran before."""
    order = np.argsort(sequence, kind="stable")
    rank = np.empty(len(sequence), np.int64)
    rank[order] = np.arange(len(sequence))
    first = np.searchsorted(sequence[order], np.arange(sequence.max() + 1))
    at = sequence[places]
    return at.tolist(), (rank[places] - first[at]).tolist()


@dataclass(frozen=True)
class _RecomputedRun:
    """Operations to repeat right before a place, with their cost and gain."""

    operations: tuple[int, ...]  # in program order
    place: int  # the place in the sequence before which they come
    later: tuple[int, ...]  # places of repeats that they make superfluous
    gain: float  # estimated byte-time above the target that they save
    score: float  # cost divided by gain
    key: tuple[int, int]  # the recomputed value, and the operation that reads it


def _with_runs(sequence: np.ndarray, runs: Sequence[_RecomputedRun]) -> np.ndarray:
    places = [r.place for r in runs for _ in r.operations]
    wider = np.insert(sequence, places, [i for r in runs for i in r.operations])
    gone = np.array(sorted({p for r in runs for p in r.later}), np.int64)
    # A place moves by the number of operations inserted at it or before it.
    return np.delete(wider, gone + np.searchsorted(np.sort(places), gone, "right"))


def _together(runs: Sequence[_RecomputedRun], above: float) -> list[_RecomputedRun]:
    """Runs about as good as the best one, for at most half of the excess."""
    together, gain = [], 0.0
    for run in runs:
        gain += run.gain
        if run.score > runs[0].score * ALIKE or gain > HALF * above:
            break
        if all(not set(run.operations) & set(r.operations) for r in together):
            together.append(run)
    return together


def _runs(
    search: RematSearch, state: EvaluatedSequence, target: float, refused
) -> list[_RecomputedRun]:
    """The most promising runs, best first."""
    tables, events = search.tables, state.events
    search.work += 0.5 + len(state.sequence) / 300
    excess = np.maximum(events.profile - target, 0)
    time = np.concatenate([[0], np.cumsum(excess > 0)])
    bulk = np.concatenate([[0.0], np.cumsum(excess)])
    # Values that wait, for longer than one operation, for their next read.
    gap = np.flatnonzero(
        (events.value[1:] == events.value[:-1])
        & ~events.make[1:]
        & (events.place[1:] > events.place[:-1] + 1)
    )
    value, a, b = events.value[gap], events.place[gap] + 1, events.place[gap + 1]
    steps = len(state.sequence)
    gain = np.minimum(tables.size[value] * (time[b] - time[a]), bulk[b] - bulk[a])
    maker = tables.maker[value]
    good = np.flatnonzero((gain > 0) & tables.recomputable[maker])
    # By the cost of the maker alone, before the whole run is known.
    estimate = search.cost[maker[good]] / gain[good]
    lookup = _SequenceLookup(search, state, target)
    runs: list[_RecomputedRun] = []
    for k in good[np.argsort(estimate, kind="stable")]:
        place = int(b[k])
        reader = int(state.sequence[place]) if place < steps else -1
        key = (int(value[k]), reader)
        if key in refused:
            continue
        run, later, price = lookup.run(key[0], place)
        if run:
            score = price / float(gain[k]) * search.chance()
            runs.append(_RecomputedRun(run, place, later, float(gain[k]), score, key))
        if len(runs) >= TRIED:
            break
    return sorted(runs, key=lambda r: r.score)


class _SequenceLookup:
    """When values are alive in a sequence."""

    def __init__(self, search: RematSearch, state: EvaluatedSequence, target: float):
        events, tables = state.events, search.tables
        self._tables, self._target = tables, target
        # Python lists, since single entries of numpy arrays are slow to read.
        self._cost, self._maker = search.cost.tolist(), tables.maker.tolist()
        self._size, self._recomputable = map(
            np.ndarray.tolist, (tables.size, tables.recomputable)
        )
        self._place, self._make = events.place.tolist(), events.make.tolist()
        numbers = np.arange(len(tables.size) + 1)
        self._start = np.searchsorted(events.value, numbers).tolist()
        self._highest = _RangeMax(events.profile)

    def run(self, value: int, place: int):
        """The operations that recompute `value` before `place`, later repeats, cost."""
        # An input is recomputed too where it is not alive and could not stay without
        # exceeding the target. No operations at all if one must not be repeated.
        needed, later, cost = set(), set(), 0.0
        stack = [self._maker[value]]
        while stack:
            i = stack.pop()
            if i in needed:
                continue
            if not self._recomputable[i]:
                return (), (), 0.0
            needed.add(i)
            # A later repeat is not needed any more, so the run costs nothing there.
            superfluous = self._superfluous(i, place)
            if superfluous is None:
                cost += self._cost[i]
            else:
                later.add(superfluous)
            for u in self._tables.reads[i]:
                end = self._end_before(u, place)
                if end < place and not self._fits(u, end + 1, place):
                    stack.append(self._maker[u])
        return tuple(sorted(needed)), tuple(sorted(later)), cost

    def _end_before(self, u: int, place: int) -> int:
        """The last read of `u` before `place`; `place` if `u` is alive there."""
        high = self._start[u + 1]
        k = bisect.bisect_left(self._place, place, self._start[u], high)
        return place if k < high and not self._make[k] else self._place[k - 1]

    def _superfluous(self, i: int, place: int) -> int | None:
        """The next repeat of operation i, if its values can stay from `place` on."""
        at = None
        for v in self._tables.makes[i]:
            high = self._start[v + 1]
            k = bisect.bisect_left(self._place, place, self._start[v], high)
            while k < high and not self._make[k]:
                k += 1
            if k == high or not self._fits(v, place, self._place[k]):
                return None
            at = self._place[k]
        return at

    def _fits(self, v: int, start: int, stop: int) -> bool:
        """Whether `v` can stay alive from `start` to before `stop`."""
        if stop <= start:
            return True
        return self._highest(start, stop) + self._size[v] <= self._target


def _removable(
    tables: SequenceTables, state: EvaluatedSequence, cost: np.ndarray, target: float
) -> list[int]:
    """Repeats whose removal may stay below the target, the most expensive first."""
    events = state.events
    same = events.value[1:] == events.value[:-1]
    # Events after which the same value is made anew; without that one, the value has to
    # stay until its next read.
    last = np.flatnonzero(events.make[1:] & same)
    highest = _RangeMax(events.profile)
    start, place = events.place[last] + 1, events.place[last + 1]
    read = np.append(same & ~events.make[1:], [False, False])[last + 1]
    size = tables.size[events.value[last]]
    fits = ~read | (start >= place) | (highest.many(start, place) + size <= target)
    needed = np.zeros(len(state.sequence), bool)
    needed[place[~fits]] = True
    places = repeats(state.sequence)
    places = places[~needed[places]]
    return places[np.argsort(-cost[state.sequence[places]], kind="stable")].tolist()


class _RangeMax:
    """The largest entry between two places, by a table of powers of two."""

    def __init__(self, values: np.ndarray):
        self._rows = [values]
        width = 1
        while 2 * width <= len(values):
            row = self._rows[-1]
            self._rows.append(np.maximum(row[:-width], row[width:]))
            width *= 2

    def __call__(self, start: int, stop: int) -> float:
        level = (stop - start).bit_length() - 1
        row = self._rows[level]
        return max(row[start], row[stop - (1 << level)])

    def many(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """The same for arrays of places; 0 where `stop` is not above `start`."""
        result = np.zeros(len(start))
        length = stop - start
        for level, row in enumerate(self._rows):
            at = np.flatnonzero((length >> level) == 1)
            if len(at):
                result[at] = np.maximum(row[start[at]], row[stop[at] - (1 << level)])
        return result
