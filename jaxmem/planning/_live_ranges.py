"""A graph as the order searches see it: live ranges, forward or backward in time.

The bytes alive are a cut function of the set of operations that have run, and cut
functions are submodular: the more operations have run, the less another one adds. The
searches rely on that.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxmem.planning._graph import Graph, checked

_Pair = tuple[int, int, int]  # bytes, output, and an input or its live range


@dataclass(frozen=True)
class LiveRange:
    """Bytes that are alive from the first start to the last end."""

    size: int  # bytes, more than 0
    # The operations that bring it to life; empty if it is alive from the beginning. A
    # value has one. Undone from the end, starts and ends are exchanged.
    starts: tuple[int, ...]
    ends: tuple[int, ...]  # must run before it dies; empty if it never does


@dataclass(frozen=True)
class OrderProblem:
    """Operations to put in order, and their live ranges."""

    before: Sequence[tuple[int, ...]]  # operation -> those that must run before it
    after: Sequence[tuple[int, ...]]  # operation -> those that must run after it
    ranges: Sequence[LiveRange]  # what is alive throughout is in `base`
    scratch: Sequence[int]  # operation -> bytes that it holds only while it runs
    # Operation -> (bytes that it saves if it starts or ends the range, output, range).
    # It uses each output and range once, and most bytes come first.
    overwrites: Sequence[tuple[_Pair, ...]]
    base: int = 0  # bytes alive at the start

    def __len__(self) -> int:
        return len(self.before)

    @cached_property
    def started_by(self) -> list[list[int]]:
        """Operation -> the ranges of which it is a start."""
        return _by_operation(len(self), (r.starts for r in self.ranges))

    @cached_property
    def ended_by(self) -> list[list[int]]:
        """Operation -> the ranges of which it is an end."""
        return _by_operation(len(self), (r.ends for r in self.ranges))

    @cached_property
    def final(self) -> int:
        """Bytes alive at the end."""
        started = sum(r.size for r in self.ranges if not r.ends)
        return self.base + started - sum(r.size for r in self.ranges if not r.starts)

    @cached_property
    def reversed(self) -> "OrderProblem":
        """The same operations undone from the end; every order has the same peak."""
        return OrderProblem(
            self.after,
            self.before,
            [LiveRange(r.size, r.ends, r.starts) for r in self.ranges],
            self.scratch,
            self.overwrites,
            self.final,
        )

    def peak(self, order: Iterable[int]) -> int:
        """The most bytes alive while an operation runs."""
        return max(self.profile(order), default=self.base)

    def profile(self, order: Iterable[int]) -> list[int]:
        """Bytes alive while each operation runs, in this order."""
        walk = LiveWalk(self)
        return [walk.do(i) for i in order]

    def key(self) -> tuple:
        """Equal for two problems that differ in nothing but `base`."""
        ranges = tuple((r.size, r.starts, r.ends) for r in self.ranges)
        before = tuple(map(tuple, self.before))
        return before, ranges, tuple(self.scratch), tuple(self.overwrites)


def _by_operation(n: int, sides: Iterable[tuple[int, ...]]) -> list[list[int]]:
    ranges: list[list[int]] = [[] for _ in range(n)]
    for k, operations in enumerate(sides):
        for i in operations:
            ranges[i].append(k)
    return ranges


def order_problem(graph: Graph) -> OrderProblem:
    """The problem of ordering all operations of a graph."""
    outputs = set(graph.outputs)
    ranges, range_of = [], {}
    scratch = [operation.scratch for operation in graph.operations]
    for v, maker in graph.maker.items():
        size, ends = graph.values[v].bytes, graph.readers[v]
        if v in graph.aliases:  # it waits until the argument's last reader has run
            ends = tuple(i for i in graph.readers[graph.aliases[v]] if i != maker)
            if not ends:  # it is written over the argument at once
                continue
        elif v in outputs:
            ends = ()
        elif not ends:  # nothing reads it, so it lives while its maker runs
            scratch[maker] += size
            continue
        if size:
            range_of[v] = len(ranges)
            ranges.append(LiveRange(size, (maker,), ends))
    overwrites = []
    for operation in graph.operations:
        pairs = [
            (min(graph.values[v].bytes, graph.values[u].bytes), v, range_of[u])
            for v, u in operation.in_place
            if u in range_of and u not in outputs and v not in graph.aliases
        ]
        overwrites.append(tuple(sorted((p for p in pairs if p[0]), key=_size_first)))
    return OrderProblem(graph.before, graph.after, ranges, scratch, overwrites)


def _size_first(pair: _Pair) -> int:
    return -pair[0]


def overwritten_pairs(pairs: Iterable[_Pair]) -> list[_Pair]:
    """Those of (bytes, output, input) pairs to use, each output and input once."""
    # The largest come first: with more pairs to choose from, they never save less.
    chosen, outputs, inputs = [], set(), set()
    for pair in sorted(pairs, key=_size_first):
        if pair[1] not in outputs and pair[2] not in inputs:
            chosen.append(pair)
            outputs.add(pair[1])
            inputs.add(pair[2])
    return chosen


def overwritten_bytes(pairs: Iterable[_Pair]) -> int:
    """Bytes saved by `overwritten_pairs`."""
    return sum(pair[0] for pair in overwritten_pairs(pairs))


class LiveWalk:
    """The bytes alive as operations run one after another."""

    def __init__(self, problem: OrderProblem):
        self.problem = problem
        self.live = problem.base  # bytes alive now
        # Range -> how many of its starts have run, and of its ends have yet to run. One
        # without starts is alive from the beginning, one without ends for ever.
        self.started = [int(not r.starts) for r in problem.ranges]
        self.pending = [len(r.ends) or 1 for r in problem.ranges]
        self._sizes = [r.size for r in problem.ranges]
        self._started_by, self._ended_by = problem.started_by, problem.ended_by

    def cost(self, i: int) -> tuple[int, int]:
        """Bytes above `live` while `i` runs, and after it."""
        started, pending, sizes = self.started, self.pending, self._sizes
        new = [k for k in self._started_by[i] if not started[k] and pending[k]]
        dead = [k for k in self._ended_by[i] if pending[k] == 1 and started[k]]
        new_bytes = sum([sizes[k] for k in new])
        during = new_bytes + self.problem.scratch[i]
        if pairs := self.problem.overwrites[i]:
            during -= overwritten_bytes(p for p in pairs if p[2] in new or p[2] in dead)
        return during, new_bytes - sum([sizes[k] for k in dead])

    def do(self, i: int) -> int:
        """Runs operation `i`; the bytes alive while it runs."""
        during, after = self.cost(i)
        during += self.live
        self.live += after
        for k in self._started_by[i]:
            self.started[k] += 1
        for k in self._ended_by[i]:
            self.pending[k] -= 1
        return during

    def undo(self, i: int) -> None:
        """Takes back `i`, the last operation that ran."""
        for k in self._started_by[i]:
            self.started[k] -= 1
        for k in self._ended_by[i]:
            self.pending[k] += 1
        self.live -= self.cost(i)[1]

    def rest(self, chosen: Sequence[int]) -> OrderProblem:
        """The problem of running `chosen` next, renumbered by their position."""
        # All that they need must be among them, or have run.
        problem, number = self.problem, {i: n for n, i in enumerate(chosen)}
        touched = {
            k for i in chosen for k in (*self._started_by[i], *self._ended_by[i])
        }
        ranges = {}
        for k in touched:
            whole = problem.ranges[k]
            starts = tuple(number[i] for i in whole.starts if i in number)
            ends = tuple(number[i] for i in whole.ends if i in number)
            alive = self.started[k] > 0
            outlives = len(ends) < self.pending[k]
            if self.pending[k] and (starts or alive) and not (alive and outlives):
                starts, ends = () if alive else starts, () if outlives else ends
                ranges[k] = LiveRange(whole.size, starts, ends)
        # In an order that does not depend on where the operations stand in the whole,
        # so that two equal layers of a network come to the same `key`.
        rank = {k: (r.starts, r.ends, r.size) for k, r in ranges.items()}
        place = {k: n for n, k in enumerate(sorted(ranges, key=lambda k: rank[k]))}
        return OrderProblem(
            [_renumbered(problem.before[i], number) for i in chosen],
            [_renumbered(problem.after[i], number) for i in chosen],
            [ranges[k] for k in place],
            [problem.scratch[i] for i in chosen],
            [_pairs_within(problem.overwrites[i], place) for i in chosen],
            self.live,
        )


def _renumbered(operations: Iterable[int], number: Mapping[int, int]) -> tuple:
    return tuple(sorted(number[i] for i in operations if i in number))


def _pairs_within(pairs: Iterable[_Pair], place: Mapping[int, int]) -> tuple:
    """Those whose range can change; outputs are numbered as they come."""
    outputs: dict[int, int] = {}
    return tuple(
        (size, outputs.setdefault(v, len(outputs)), place[k])
        for size, v, k in pairs
        if k in place
    )


def profile(graph: Graph, order: Sequence[int] | None = None) -> list[int]:
    """Bytes alive while each operation runs, arguments not counted.

    The figure is the sum of the values that were alive before the operation, its
    outputs and its scratch, less what the outputs may overwrite
    (`Operation.in_place`).

    Args:
      graph: the graph.
      order: every operation once, inputs first; None is program order.

    Returns:
      One figure an operation, in this order.

    Raises:
      ValueError: `order` is not such an order.
    """
    order = checked_order(graph, order)
    return order_problem(graph).profile(order)


def peak(graph: Graph, order: Sequence[int] | None = None) -> int:
    """The largest figure of `profile`; 0 for a graph without operations."""
    return max(profile(graph, order), default=0)


def checked_order(graph: Graph, order: Sequence[int] | None) -> Sequence[int]:
    """The order, checked; program order for None."""
    if order is None:
        return range(len(checked(graph).operations))
    return checked(graph).check_order(order)
