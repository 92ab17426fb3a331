"""The bytes of a sequence of operations in which an operation may be repeated.

A sequence has no "drop": a value lives from when it is made to its last reader before
it is made anew, so recomputing it late is what frees it in between. Every sequence is
valid in which each operation follows the first makers of its inputs; only bytes and
cost differ. `SequenceTables` evaluates a whole sequence with a few array operations.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from jaxmem._checks import check_numbers, shown
from jaxmem.planning._graph import Graph, checked


def sequence_profile(graph: Graph, sequence: Sequence[int]) -> list[int]:
    """Bytes alive while each operation of a sequence runs, arguments not counted.

    As `profile`, for a sequence with repeats. An output of the graph is alive from the
    last time it is made to the end; any other value from each time it is made to its
    last reader before the next.

    Args:
      graph: the graph.
      sequence: every operation at least once, inputs first.

    Returns:
      Bytes, one figure for each entry of the sequence.

    Raises:
      ValueError: an operation is missing, comes before what it reads, or is repeated
        although it must not be (`Operation.recomputable`, or its output takes over the
        buffer of an argument).
    """
    sequence = check_sequence(graph, sequence)
    events = SequenceTables(graph).events(np.asarray(sequence, dtype=np.int64))
    return [int(b) for b in events.profile]


def repeatable(graph: Graph) -> list[bool]:
    """Which operations may be repeated."""
    return [
        o.recomputable and not any(v in graph.aliases for v in o.outputs)
        for o in graph.operations
    ]


def check_sequence(graph: Graph, sequence: Sequence[int]) -> tuple[int, ...]:
    """The sequence; ValueError for one in which the graph cannot be run."""
    sequence = check_numbers("sequence", sequence, "numbers of operations")
    recomputable, done = repeatable(checked(graph)), set()
    said = f": {shown(sequence)}"
    for place, i in enumerate(sequence):
        if not 0 <= i < len(graph.operations):
            raise ValueError(f"sequence[{place}]: there is no operation {i}{said}")
        early = [b for b in graph.before[i] if b not in done]
        if early:
            raise ValueError(f"sequence: operation {i} comes before {early[0]}{said}")
        if i in done and not recomputable[i]:
            raise ValueError(f"sequence: operation {i} must not be repeated{said}")
        done.add(i)
    missing = set(range(len(graph.operations))) - done
    if missing:
        raise ValueError(f"sequence: operation {min(missing)} is missing{said}")
    return sequence


@dataclass(frozen=True)
class SequenceEvents:
    """When a sequence makes and reads each value, and the bytes over time."""

    sequence: np.ndarray  # the operations
    # Events are sorted by value, then place. An output of the graph is read once more,
    # one place after the last.
    value: np.ndarray  # (events,)
    place: np.ndarray  # (events,) in the sequence
    make: np.ndarray  # (events,) whether the value is made there, not read
    profile: np.ndarray  # bytes alive while each operation runs

    @property
    def peak(self) -> int:
        return int(self.profile.max(initial=0))


class SequenceTables:
    """A graph as arrays, for evaluating many sequences of its operations."""

    def __init__(self, graph: Graph):
        self.graph = graph
        arguments, operations = set(graph.arguments), graph.operations
        self.size = np.array([v.bytes for v in graph.values], dtype=np.float64)
        # The operation that makes each value; -1 for arguments.
        self.maker = np.full(len(graph.values), -1, dtype=np.int64)
        self.maker[list(graph.maker)] = list(graph.maker.values())
        self.recomputable = np.array(repeatable(graph), dtype=bool)
        own = lambda values: [v for v in values if v not in graph.aliases]
        # Operation -> values, without arguments and aliased outputs.
        self.reads = [
            own(v for v in dict.fromkeys(o.inputs) if v not in arguments)
            for o in operations
        ]
        self.makes = [own(o.outputs) for o in operations]
        self._scratch = np.array([o.scratch for o in operations], dtype=np.float64)
        made = (v for v in dict.fromkeys(graph.outputs) if v in graph.maker)
        # The graph's outputs among these stay alive to the end.
        self.held = np.array(own(made), dtype=np.int64)
        self.held_set = frozenset(self.held.tolist())
        # The values that an operation reads and makes: 2 v for a read, 2 v + 1 for a
        # value made, so that one sort puts a read before the next making.
        self._touches = _Ragged(
            [
                [2 * v for v in read] + [2 * v + 1 for v in made]
                for read, made in zip(self.reads, self.makes, strict=True)
            ]
        )
        self._set_pairs()
        self._set_aliases()

    def _set_pairs(self) -> None:
        """The (output, input) pairs of each operation, the largest first."""
        graph = self.graph
        saved = lambda pair: graph.bytes_of([min(pair, key=self.size.__getitem__)])
        pairs = [
            sorted(
                (
                    (v, u)
                    for v, u in o.in_place
                    if u in graph.maker and not {v, u} & graph.aliases.keys()
                ),
                key=saved,
                reverse=True,
            )
            for o in graph.operations
        ]
        self._pair_output = _Ragged([[v for v, _ in p] for p in pairs])
        self._pair_input = _Ragged([[u for _, u in p] for p in pairs])

    def _set_aliases(self) -> None:
        """The outputs that wait until the argument they take over has been read."""
        graph = self.graph
        new = [v for v, a in graph.aliases.items() if v in graph.maker]
        new = [v for v in new if graph.readers[graph.aliases[v]]]
        self._new = np.array(new, dtype=np.int64)
        old_readers = [graph.readers[graph.aliases[v]] for v in new]
        self._old_readers = np.array([r for rs in old_readers for r in rs], np.int64)
        lengths = np.array([len(rs) for rs in old_readers], np.int64)
        self._old_start = np.cumsum(lengths) - lengths

    def events(self, sequence: np.ndarray) -> SequenceEvents:
        """Lifetimes and bytes of a sequence, which must be valid."""
        steps = len(sequence)
        touched, place = self._touches.rows(sequence)
        value = np.concatenate([touched >> 1, self.held])
        make = np.concatenate([touched & 1, np.zeros(len(self.held), np.int64)])
        place = np.concatenate([place, np.full(len(self.held), steps)])
        key = np.sort((value * (steps + 1) + place) * 2 + make)
        make = (key & 1).astype(bool)
        value, place = np.divmod(key >> 1, steps + 1)
        last = np.ones(len(key), bool)
        last[:-1] = make[1:] | (value[1:] != value[:-1])
        # After sorting, the reads of a value follow its making; `last` marks the event
        # after which it is dead.
        size = self.size[value[make]]
        alive = np.bincount(place[make], size, steps + 2)
        alive -= np.bincount(place[last] + 1, size, steps + 2)
        profile = np.cumsum(alive[:steps]) + self._scratch[sequence]
        profile += self.waiting_outputs(sequence)
        if len(self._pair_input):
            self._write_over(profile, sequence, key, last)
        return SequenceEvents(sequence, value, place, make, profile)

    def waiting_outputs(self, sequence: np.ndarray) -> np.ndarray:
        """Bytes of aliased outputs while the old argument has yet to be read."""
        steps = len(sequence)
        if not len(self._new):
            return np.zeros(steps)
        latest = np.empty(len(self.graph.operations), np.int64)
        latest[sequence] = np.arange(steps)  # of equal indices the last one counts
        made = latest[self.maker[self._new]]
        end = np.maximum.reduceat(latest[self._old_readers], self._old_start)
        wait = end > made
        size = self.size[self._new[wait]]
        alive = np.bincount(made[wait], size, steps + 1)
        alive -= np.bincount(end[wait] + 1, size, steps + 1)
        return np.cumsum(alive[:steps])

    def _write_over(self, profile, sequence, key, last) -> None:
        """Subtracts from the profile the bytes that overwrite dead inputs."""
        # Of several pairs of an operation the largest counts, then those whose output
        # and input are not taken yet.
        source, place = self._pair_input.rows(sequence)
        target, _ = self._pair_output.rows(sequence)
        at = np.searchsorted(key, (source * (len(sequence) + 1) + place) * 2)
        free = np.flatnonzero(last[at])
        source, target, place = source[free], target[free], place[free]
        while len(place):
            _, first = np.unique(place, return_index=True)
            v, u, p = target[first], source[first], place[first]
            profile[p] -= np.minimum(self.size[v], self.size[u])
            which = np.searchsorted(p, place)
            rest = (target != v[which]) & (source != u[which])
            source, target, place = source[rest], target[rest], place[rest]


def staged(
    tables: SequenceTables, stages: Sequence[Sequence[int]], kept: Sequence[Set[int]]
) -> np.ndarray:
    """The sequence of a plan: its stages, and what stays alive as each begins."""
    # Other values are recomputed right before they are read.
    alive: set[int] = set()
    sequence: list[int] = []
    once = {v for i in np.flatnonzero(~tables.recomputable) for v in tables.makes[i]}
    for operations, keep in zip(stages, kept, strict=True):
        alive &= keep | once
        for i in operations:
            sequence += with_missing(tables, {i}, alive)
            alive.update(tables.makes[i])
    return without_unread(tables, sequence)


def with_missing(tables: SequenceTables, run: Set[int], alive: set[int]) -> list[int]:
    """`run` and the makers of what it lacks, in program order; adds to `alive`."""
    needed, stack = set(run), list(run)
    while stack:
        for u in tables.reads[stack.pop()]:
            j = int(tables.maker[u])
            if u not in alive and j not in needed:
                needed.add(j)
                stack.append(j)
    alive.update(v for j in needed for v in tables.makes[j])
    return sorted(needed)


def without_unread(tables: SequenceTables, sequence: Sequence[int]) -> np.ndarray:
    """The sequence without repeats whose values nothing reads before the next one."""
    first = set(np.unique(sequence, return_index=True)[1].tolist())
    wanted, kept = set(tables.held_set), []
    for place in range(len(sequence) - 1, -1, -1):
        i = int(sequence[place])
        if place in first or not wanted.isdisjoint(tables.makes[i]):
            kept.append(i)
            wanted.difference_update(tables.makes[i])
            wanted.update(tables.reads[i])
    return np.array(kept[::-1], dtype=np.int64)


def repeats(sequence: np.ndarray) -> np.ndarray:
    """The places of operations that ran before."""
    first = np.unique(sequence, return_index=True)[1]
    repeat = np.ones(len(sequence), bool)
    repeat[first] = False
    return np.flatnonzero(repeat)


def least_possible(graph: Graph) -> int:
    """Bytes that every sequence has alive at some time, whatever it repeats."""
    # The largest working set of a single operation (its inputs, outputs and scratch),
    # or the graph's outputs at the end.
    tables = SequenceTables(graph)
    most = tables.size[tables.held].sum()
    for i, operation in enumerate(graph.operations):
        working = tables.size[[*tables.reads[i], *tables.makes[i]]].sum()
        overwritten = sum(
            max(
                (tables.size[[v, u]].min() for w, u in operation.in_place if w == v),
                default=0.0,
            )
            for v in tables.makes[i]
        )
        most = max(most, working - overwritten + operation.scratch)
    return int(most)


class _Ragged:
    """Rows of different lengths in one array."""

    def __init__(self, rows: Sequence[Sequence[int]]):
        self._length = np.array([len(r) for r in rows], dtype=np.int64)
        self._start = np.cumsum(self._length) - self._length
        self._all = np.array([x for r in rows for x in r], dtype=np.int64)

    def __len__(self):
        return len(self._all)

    def rows(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The entries of these rows in sequence, and for each the place of its row."""
        length = self._length[which]
        ends = np.cumsum(length)
        total = int(ends[-1]) if len(ends) else 0
        offset = np.repeat(self._start[which] - ends + length, length)
        return self._all[offset + np.arange(total)], np.repeat(
            np.arange(len(which)), length
        )
