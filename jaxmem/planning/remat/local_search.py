"""Recomputation by small steps on the exact bytes: recompute what frees most per cost.

`lower` brings a sequence down to a target. A value that waits between two readers while
the target is exceeded can be recomputed right before the second; whatever is not there
any more by then, and would exceed the target if it were kept, is recomputed with it,
and a later repeat that this makes superfluous goes. Among all such runs the one is
taken that costs least per byte-time above the target, and the bytes of the whole
sequence are evaluated anew. `cheapen` takes back repeats that the target does not need.
`refine` does both in turn after taking back some repeats at random, and keeps what is
cheaper.

It is a greedy search: a run is never judged together with the next one, which is what
the plans of `_remat_chain` are for.
"""

import bisect
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxmem.planning.remat.sequence import SequenceEvents, SequenceTables

TRIED = 12  # runs looked at closely in a step
ALIKE = 1.05  # runs whose scores differ by less are taken together
HALF = 0.5
NOISE = 0.4
IDLE = 40  # rounds of `refine` in a row without a gain
PATIENCE = 150  # runs that may fail on the way to a target
ABOVE = 1e-9
SHORT = 0.05  # how long a repeat takes, against an operation that is done once


@dataclass(frozen=True)
class EvaluatedSequence:
    """A sequence, what it takes, and what it costs beyond doing everything once."""

    events: SequenceEvents
    cost: float

    @property
    def sequence(self) -> np.ndarray:
        return self.events.sequence

    @property
    def peak(self) -> int:
        return self.events.peak


class RematSearch:
    """Sequences over one graph.

    Args:
      tables: the graph.
      cost: seconds, or what the caller counts in, of each operation.
      found: is told of every sequence evaluated.
      deadline: `time.monotonic()` at which every search returns what it has.

    Attributes:
      work: what has been evaluated, in quarters of a millisecond or so.
    """

    def __init__(
        self,
        tables: SequenceTables,
        cost: np.ndarray,
        found: Callable[[EvaluatedSequence], None],
        deadline: float = math.inf,
    ):
        self.tables, self.cost, self._found = tables, cost, found
        self._deadline = deadline
        self._random: np.random.Generator | None = None  # to try other runs first
        self.work = 0.0

    def chance(self) -> float:
        """A factor round 1 while `refine` runs, else 1."""
        if self._random is None:
            return 1.0
        return math.exp(NOISE * float(self._random.standard_normal()))

    def late(self) -> bool:
        return time.monotonic() > self._deadline

    def state(self, sequence: np.ndarray) -> EvaluatedSequence:
        """Evaluates a sequence."""
        self.work += 0.2 + len(sequence) / 1000
        recomputable = np.bincount(sequence, minlength=len(self.cost)) - 1
        state = EvaluatedSequence(
            self.tables.events(sequence), float(recomputable @ self.cost)
        )
        self._found(state)
        return state

    def lower(
        self,
        state: EvaluatedSequence,
        target: float,
        longest: float = math.inf,
        most: float = math.inf,
        work: float = math.inf,
    ) -> EvaluatedSequence:
        """Steps until the peak is at most `target`, or none helps.

        Args:
          longest: a sequence that is longer is given back as it is.
          most: and one that costs more.
          work: how much to evaluate at most, in quarters of a millisecond or so.
        """
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
        self, state, runs, target, above, part: float = 0.0
    ) -> EvaluatedSequence | None:
        """The state with these runs, if it is lower by that part of their gain."""
        after = self.state(_with_runs(state.sequence, runs))
        gain = max(part * sum(r.gain for r in runs), above * ABOVE)
        if _above(after, target) >= above - gain:
            return None
        return after if after.peak <= max(state.peak, target) else None

    def cheapen(self, state: EvaluatedSequence, target: float) -> EvaluatedSequence:
        """Takes back the dearest repeats as long as the peak stays at most `target`."""
        kept: set[tuple[int, int]] = set()
        many = 1
        while not self.late():
            places = _removable(self.tables, state, self.cost, target)
            names = zip(*_occurrences(state.sequence, places), strict=True)
            left = [(p, n) for p, n in zip(places, names, strict=True) if n not in kept]
            if not left:
                break
            gone = [p for p, _ in left[:many]]
            without = self.state(np.delete(state.sequence, gone))
            if without.peak <= target:
                state, many = without, 2 * many
            elif len(gone) == 1:
                kept.add(left[0][1])
            else:
                many = len(gone) // 2
        return state

    def refine(
        self, state: EvaluatedSequence, target: float, work: float, seed: int
    ) -> EvaluatedSequence:
        """Takes back some repeats, lowers and cheapens; keeps what costs less.

        Args:
          work: how much to evaluate, in quarters of a millisecond or so.
        """
        random, end, idle = np.random.default_rng(seed), self.work + work, 0
        while self.work < end and idle < IDLE and not self.late():
            repeats = _repeats(state.sequence)
            if len(repeats) == 0 or state.peak > target:
                break
            few = min(len(repeats), int(random.integers(1, 5)))
            if random.random() < 0.5:
                start = random.integers(0, len(repeats) - few + 1)
                gone = repeats[start : start + few]
            else:
                gone = random.choice(repeats, few, replace=False)
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
    """Byte-time above the target; a repeat is a short time."""
    excess = np.maximum(state.events.profile - target, 0)
    repeats = float(excess[_repeats(state.sequence)].sum())
    return float(excess.sum()) - (1 - SHORT) * repeats


def _repeats(sequence: np.ndarray) -> np.ndarray:
    """The places of the operations that were done before."""
    first = np.unique(sequence, return_index=True)[1]
    repeat = np.ones(len(sequence), bool)
    repeat[first] = False
    return np.flatnonzero(repeat)


def _occurrences(sequence: np.ndarray, places) -> tuple[list[int], list[int]]:
    """Which operations stand at these places, and for which time they do."""
    order = np.argsort(sequence, kind="stable")
    rank = np.empty(len(sequence), np.int64)
    rank[order] = np.arange(len(sequence))
    first = np.searchsorted(sequence[order], np.arange(sequence.max() + 1))
    at = sequence[places]
    return at.tolist(), (rank[places] - first[at]).tolist()


@dataclass(frozen=True)
class _RecomputedRun:
    """Operations to be repeated right before a place; what that costs and frees.

    Attributes:
      operations: in program order.
      place: before which they come.
      later: places of repeats that they make superfluous.
      gain: byte-time above the target that goes with them, about.
      score: cost for the gain.
      key: the value that is recomputed, and the operation that reads it.
    """

    operations: tuple[int, ...]
    place: int
    later: tuple[int, ...]
    gain: float
    score: float
    key: tuple[int, int]


def _with_runs(sequence: np.ndarray, runs: Sequence[_RecomputedRun]) -> np.ndarray:
    places = [r.place for r in runs for _ in r.operations]
    wider = np.insert(sequence, places, [i for r in runs for i in r.operations])
    gone = np.array(sorted({p for r in runs for p in r.later}), np.int64)
    # A place moves by what was inserted at it or before.
    return np.delete(wider, gone + np.searchsorted(np.sort(places), gone, "right"))


def _together(runs: Sequence[_RecomputedRun], above: float) -> list[_RecomputedRun]:
    """Runs as good as the best one, for half of what is above the target."""
    found, gain = [], 0.0
    for run in runs:
        gain += run.gain
        if run.score > runs[0].score * ALIKE or gain > HALF * above:
            break
        if all(not set(run.operations) & set(r.operations) for r in found):
            found.append(run)
    return found


def _runs(
    search: RematSearch, state: EvaluatedSequence, target: float, refused
) -> list[_RecomputedRun]:
    """The most promising runs, best first."""
    tables, events = search.tables, state.events
    search.work += 0.5 + len(state.sequence) / 300
    excess = np.maximum(events.profile - target, 0)
    time = np.concatenate([[0], np.cumsum(excess > 0)])
    bulk = np.concatenate([[0.0], np.cumsum(excess)])
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
    hopeful = search.cost[maker[good]] / gain[good]
    lookup = _SequenceLookup(tables, state, search.cost, target)
    found: list[_RecomputedRun] = []
    for k in good[np.argsort(hopeful, kind="stable")]:
        place = int(b[k])
        reader = int(state.sequence[place]) if place < steps else -1
        key = (int(value[k]), reader)
        if key in refused:
            continue
        run, later, price = lookup.run(key[0], place)
        if run:
            score = price / float(gain[k]) * search.chance()
            found.append(_RecomputedRun(run, place, later, float(gain[k]), score, key))
        if len(found) >= TRIED:
            break
    return sorted(found, key=lambda r: r.score)


class _SequenceLookup:
    """What is there when, in a sequence; plain lists, which are quick one by one."""

    def __init__(
        self,
        tables: SequenceTables,
        state: EvaluatedSequence,
        cost: np.ndarray,
        target: float,
    ):
        events = state.events
        self._tables, self._target = tables, target
        self._cost, self._maker = cost.tolist(), tables.maker.tolist()
        self._size, self._recomputable = (
            tables.size.tolist(),
            tables.recomputable.tolist(),
        )
        self._place, self._make = events.place.tolist(), events.make.tolist()
        numbers = np.arange(len(tables.size) + 1)
        self._start = np.searchsorted(events.value, numbers).tolist()
        self._highest = _RangeMax(events.profile)

    def run(self, value: int, place: int):
        """What recomputes `value` before `place`: operations, repeats to drop, cost.

        Operations are none if something in it must not be repeated.
        """
        needed, later, cost = set(), set(), 0.0
        stack = [self._maker[value]]
        while stack:
            i = stack.pop()
            if i in needed:
                continue
            if not self._recomputable[i]:
                return (), (), 0.0
            needed.add(i)
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
        """Until when the instance of `u` before `place` lives; `place` if beyond it."""
        high = self._start[u + 1]
        k = bisect.bisect_left(self._place, place, self._start[u], high)
        return place if k < high and not self._make[k] else self._place[k - 1]

    def _superfluous(self, i: int, place: int) -> int | None:
        """The next repeat of operation i, if its values can be kept from `place` on."""
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
        """Whether `v` can be kept from `start` to before `stop`."""
        if stop <= start:
            return True
        return self._highest(start, stop) + self._size[v] <= self._target


def _removable(tables, state: EvaluatedSequence, cost, target: float) -> list[int]:
    """Places of repeats whose removal may stay below the target, dearest first."""
    events, steps = state.events, len(state.sequence)
    recomputable = np.flatnonzero(
        events.make[1:] & (events.value[1:] == events.value[:-1])
    )
    highest = _RangeMax(events.profile)
    start, place = events.place[recomputable] + 1, events.place[recomputable + 1]
    read = np.zeros(len(recomputable), bool)
    following = recomputable + 2
    inside = following < len(events.value)
    read[inside] = (
        events.value[following[inside]] == events.value[recomputable[inside]]
    ) & (~events.make[following[inside]])
    size = tables.size[events.value[recomputable]]
    fits = ~read | (start >= place) | (highest.many(start, place) + size <= target)
    bad = np.zeros(steps, bool)
    bad[place[~fits]] = True
    places = _repeats(state.sequence)
    places = places[~bad[places]]
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
        """As a call, for many; 0 where there is nothing between."""
        result = np.zeros(len(start))
        length = stop - start
        for level, row in enumerate(self._rows):
            at = np.flatnonzero((length >> level) == 1)
            if len(at):
                result[at] = np.maximum(row[start[at]], row[stop[at] - (1 << level)])
        return result
