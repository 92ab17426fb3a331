"""Bytes that no order can do with fewer of.

There are three bounds, each at least the one before it, of the bytes alive while a
single operation runs. The largest over the operations bounds the peak. It is not always
the optimum: the sets that are best for two operations may not occur in one order.
"""

import math
from collections.abc import Iterable
from functools import cached_property

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from jaxmem._checks import check_int
from jaxmem.planning._bitsets import members, union
from jaxmem.planning._graph import Graph, checked
from jaxmem.planning._live_ranges import (
    LiveRange,
    OrderProblem,
    order_problem,
    overwritten_bytes,
)

LARGEST = 2**31 - 1  # scipy's maximum flow takes capacities of 32 bits


def lower_bound(graph: Graph, *, cuts: int = 16) -> int:
    """Bytes that every order of the graph has alive at some time.

    Args:
      graph: the graph.
      cuts: the number of operations to solve a minimum cut for: those where the second
        bound is largest. A larger number can only raise the bound.

    Returns:
      Bytes; the arguments are not counted.

    Raises:
      ValueError: `cuts` is negative.
    """
    cuts = check_int("cuts", cuts, 0)
    return PeakBounds(order_problem(checked(graph))).largest(cuts)


class PeakBounds:
    """The bounds of a forward problem, computed on demand."""

    def __init__(self, problem: OrderProblem):
        self.problem = problem
        # Operation -> itself and all its predecessors, or successors, as a bit set.
        self.behind, self.ahead = _closure(problem.before), _closure(problem.after)
        self._cuts: dict[int, int] = {}

    @cached_property
    def necessary(self) -> np.ndarray:
        """Operation -> bytes necessarily alive while it runs (the second bound)."""
        # Its working set (the first bound), what its predecessors make and what its
        # successors read.
        problem, n = self.problem, len(self.problem)
        total = np.full(n, problem.base, np.int64)
        total -= sum(r.size for r in problem.ranges if not r.starts)
        for live_range in problem.ranges:
            total[_unpacked(self._alive(live_range), n)] += live_range.size
        saved = [self._saved(i) if p else 0 for i, p in enumerate(problem.overwrites)]
        return total + np.array(problem.scratch, np.int64) - np.array(saved, np.int64)

    def _alive(self, live_range: LiveRange) -> int:
        """The operations during which a range is alive in every order."""
        alive = (1 << len(self.problem)) - 1
        if live_range.starts:
            alive &= union(self.ahead[i] for i in live_range.starts)
        if live_range.ends:
            alive &= union(self.behind[i] for i in live_range.ends)
        return alive

    def _saved(self, i: int) -> int:
        """The most bytes that `i` can save by overwriting its inputs."""
        return overwritten_bytes(
            p for p in self.problem.overwrites[i] if self._can_end(i, p[2])
        )

    def _can_end(self, i: int, k: int) -> bool:
        """Whether `i` can be the last of the ends of range `k`."""
        ends = self.problem.ranges[k].ends
        return i in ends and not any(self.ahead[i] >> j & 1 for j in ends if j != i)

    def cut(self, i: int) -> int:
        """The least bytes alive while `i` runs, in any order (the third bound)."""
        if i not in self._cuts:
            self._cuts[i] = max(int(self.necessary[i]), self._least(i))
        return self._cuts[i]

    def _least(self, i: int) -> int:
        problem = self.problem
        base = problem.base - sum(r.size for r in problem.ranges if not r.starts)
        base += problem.scratch[i]
        ranges = [(r.size, r.starts, r.ends) for r in problem.ranges]
        least = self._minimum_cut(i, ranges) - self._saved(i)
        # A second relaxation: each range that may be overwritten is, where it can be.
        saves: dict[int, int] = {}
        for size, _, k in problem.overwrites[i]:
            saves[k] = max(size, saves.get(k, 0))
        if saves:
            for k, saved in saves.items():
                size, starts, ends = ranges[k]
                others = tuple(j for j in ends if j != i)
                if i in ends:
                    ranges[k] = (size - saved, starts, ends)
                    if others:
                        ranges.append((saved, starts, others))
            least = max(least, self._minimum_cut(i, ranges))
        return base + least

    def _minimum_cut(self, i: int, ranges: Iterable[tuple]) -> int:
        """The least bytes of (size, starts, ends) `ranges` alive while `i` runs."""
        # The least over every set of operations that may have run by then. A range is
        # an edge with several ends, as in hypergraph partitioning: all of its bytes are
        # cut as soon as a start has run and an end has not.
        network = _FlowNetwork()
        done, undone = self.behind[i], self.ahead[i]
        free = ((1 << len(self.problem)) - 1) & ~(done | undone)
        for size, starts, ends in ranges:
            begun = not starts or any(done >> j & 1 for j in starts)
            stays = not ends or any(undone >> j & 1 for j in ends)
            sources = [0] if begun else [j + 2 for j in starts if free >> j & 1]
            sinks = [1] if stays else [j + 2 for j in ends if free >> j & 1]
            if size and sources and sinks:
                network.add(size, sources, sinks)
        if not network.edges:
            return network.constant
        for j in members(free):
            network.implied += [
                (j + 2, b + 2) for b in self.problem.before[j] if free >> b & 1
            ]
        return network.constant + network.minimum()

    def largest(self, cuts: int) -> int:
        """The largest bound, with minimum cuts at `cuts` operations."""
        if not len(self.problem):
            return self.problem.base
        first = np.argsort(-self.necessary, kind="stable")[:cuts]
        best = max(self.problem.base, self.problem.final, int(self.necessary.max()))
        return max(best, *(self.cut(int(i)) for i in first)) if cuts else best


class _FlowNetwork:
    """A flow network; node 0 is the source, node 1 the sink."""

    def __init__(self):
        self.constant = 0
        self.edges: dict[tuple[int, int], int] = {}
        self.implied: list[tuple[int, int]] = []  # edges that are never cut
        self._inner = -1

    def add(self, size: int, starts: list[int], stops: list[int]) -> None:
        """Adds bytes that are cut when a start is on the source's side, a stop not."""
        if starts == [0] and stops == [1]:
            self.constant += size
            return
        start = starts[0] if len(starts) == 1 else self._node()
        stop = stops[0] if len(stops) == 1 else self._node()
        if len(starts) > 1:
            self.implied += [(j, start) for j in starts]
        if len(stops) > 1:
            self.implied += [(stop, j) for j in stops]
        self.edges[start, stop] = self.edges.get((start, stop), 0) + size

    def _node(self) -> int:
        self._inner -= 1
        return self._inner

    def minimum(self) -> int:
        """The least bytes cut, rounded down where 32 bits cannot hold the sizes."""
        unit = math.gcd(*self.edges.values())
        unit *= -(-sum(self.edges.values()) // unit // (LARGEST - 1)) or 1
        never = sum(size // unit for size in self.edges.values()) + 1
        capacity = {edge: size // unit for edge, size in self.edges.items()}
        capacity |= dict.fromkeys(self.implied, never)
        nodes = {0: 0, 1: 1}
        ends = [[nodes.setdefault(j, len(nodes)) for j in edge] for edge in capacity]
        rows, columns = np.array(ends).T
        data = np.fromiter(capacity.values(), np.int32)
        shape = (len(nodes), len(nodes))
        network = csr_array((data, (rows, columns)), shape)
        return unit * int(maximum_flow(network, 0, 1).flow_value)


def _closure(before) -> list[int]:
    """Operation -> itself and all that can be reached, as a bit set."""
    reached: list[int] = [0] * len(before)
    for i in _sorted(before):
        reached[i] = union(reached[j] for j in before[i]) | 1 << i
    return reached


def _sorted(before) -> Iterable[int]:
    """The operations, predecessors first: program order or its reverse."""
    upward = all(j < i for i, earlier in enumerate(before) for j in earlier)
    return range(len(before)) if upward else range(len(before) - 1, -1, -1)


def _unpacked(bits: int, n: int) -> np.ndarray:
    data = np.frombuffer(bits.to_bytes(-(-n // 8), "little"), np.uint8)
    return np.unpackbits(data, count=n, bitorder="little").view(bool)
