"""Bytes that no order can do with fewer of.

Three bounds, each at least the one before it; all are about a single operation, for
which the bytes alive while it runs are bounded from below:

1. its working set: what it reads, makes and holds;
2. what is necessarily alive then: made by what must come before it, and read by what
   must come after it;
3. the least over every set of operations that can be done by then. The bytes alive are
   a cut function, so that is a minimum cut, and exact for one operation alone.

The largest over the operations bounds the peak. It is not the optimum in general: each
operation has a set of its own, and one order has to pass through all of them.
"""

import math
from collections.abc import Iterable
from functools import cached_property

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from jaxmem._checks import check_int
from jaxmem.planning._graph import Graph, checked
from jaxmem.planning._live_ranges import OrderProblem, order_problem
from jaxmem.planning._liveness import written_over

LARGEST = 2**31 - 1  # capacities are 32-bit


def lower_bound(graph: Graph, *, cuts: int = 16) -> int:
    """Bytes that every order of the graph has alive at some time.

    Args:
      graph: the graph.
      cuts: for how many operations a minimum cut is found: those where the bound
        without is largest. More can only raise the bound.

    Returns:
      Bytes; the arguments are not counted.
    """
    cuts = check_int("cuts", cuts, 0)
    return PeakBounds(order_problem(checked(graph))).largest(cuts)


class PeakBounds:
    """The bounds of a problem (one that goes forward), found when they are asked for.

    Attributes:
      behind: operation -> itself and all that must come before it, as a bit set.
      ahead: operation -> itself and all that must come after it, as a bit set.
    """

    def __init__(self, problem: OrderProblem):
        self.problem = problem
        self.behind, self.ahead = _closure(problem.before), _closure(problem.after)
        self._cuts: dict[int, int] = {}

    @cached_property
    def necessary(self) -> np.ndarray:
        """Operation -> bytes necessarily alive while it runs (the second bound)."""
        problem, n = self.problem, len(self.problem)
        total = np.full(n, problem.base, np.int64)
        total -= sum(p.size for p in problem.pieces if not p.tails)
        for piece in problem.pieces:
            total[_unpacked(self._alive(piece), n)] += piece.size
        saved = [self._saved(i) if over else 0 for i, over in enumerate(problem.over)]
        return total + np.asarray(problem.extra, np.int64) - np.asarray(saved, np.int64)

    def _alive(self, piece) -> int:
        """The operations during which a piece is there in every order."""
        everything = (1 << len(self.problem)) - 1
        made = _union(self.ahead[i] for i in piece.tails) if piece.tails else everything
        read = (
            _union(self.behind[i] for i in piece.heads) if piece.heads else everything
        )
        return made & read

    def _saved(self, i: int) -> int:
        """The most that `i` can save by writing over what it reads."""
        return written_over(p for p in self.problem.over[i] if self._can_end(i, p[2]))

    def _can_end(self, i: int, k: int) -> bool:
        heads = self.problem.pieces[k].heads
        return i in heads and not any(self.ahead[i] >> j & 1 for j in heads if j != i)

    def cut(self, i: int) -> int:
        """The least bytes alive while `i` runs, in any order (the third bound)."""
        if i not in self._cuts:
            self._cuts[i] = max(int(self.necessary[i]), self._least(i))
        return self._cuts[i]

    def _least(self, i: int) -> int:
        problem, over = self.problem, self.problem.over[i]
        base = problem.base - sum(p.size for p in problem.pieces if not p.tails)
        base += problem.extra[i]
        pieces = [(p.size, p.tails, p.heads) for p in problem.pieces]
        least = self._minimum_cut(i, pieces) - self._saved(i)
        if over:  # or each piece that may be written over as if it were, when it can be
            saves: dict[int, int] = {}
            for size, _, k in over:
                saves[k] = max(size, saves.get(k, 0))
            for k, saved in saves.items():
                size, tails, heads = pieces[k]
                others = tuple(j for j in heads if j != i)
                if i in heads:
                    pieces[k] = (size - saved, tails, heads)
                    if others:
                        pieces.append((saved, tails, others))
            least = max(least, self._minimum_cut(i, pieces))
        return base + least

    def _minimum_cut(self, i: int, pieces: Iterable[tuple]) -> int:
        """The least bytes of `pieces` that are there while `i` runs.

        Source: an edge with several ends, as in hypergraph partitioning: all of its
        bytes are cut as soon as a tail is on this side and a head on the other.
        """
        network = _FlowNetwork()
        done, undone = self.behind[i], self.ahead[i]
        free = ((1 << len(self.problem)) - 1) & ~(done | undone)
        for size, tails, heads in pieces:
            there = not tails or any(done >> j & 1 for j in tails)
            stays = not heads or any(undone >> j & 1 for j in heads)
            starts = [0] if there else [j + 2 for j in tails if free >> j & 1]
            stops = [1] if stays else [j + 2 for j in heads if free >> j & 1]
            if size and starts and stops:
                network.add(size, starts, stops)
        if not network.edges:
            return network.constant
        for j in _bits(free):
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
    """A flow network; node 0 is the source, 1 the sink."""

    def __init__(self):
        self.constant = 0
        self.edges: dict[tuple[int, int], int] = {}
        self.implied: list[tuple[int, int]] = []  # edges that are never cut
        self._inner = -1

    def add(self, size: int, starts: list[int], stops: list[int]) -> None:
        """Bytes that are cut when a start is on this side and a stop on the other."""
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
        """The least bytes cut, rounded down where 32 bits cannot hold them."""
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
    found: list[int] = [0] * len(before)
    for i in _sorted(before):
        bits = 1 << i
        for j in before[i]:
            bits |= found[j]
        found[i] = bits
    return found


def _sorted(before) -> Iterable[int]:
    """The operations, what is before each first: program order or its reverse."""
    upward = all(j < i for i, found in enumerate(before) for j in found)
    return range(len(before)) if upward else range(len(before) - 1, -1, -1)


def _union(sets: Iterable[int]) -> int:
    bits = 0
    for found in sets:
        bits |= found
    return bits


def _unpacked(bits: int, n: int) -> np.ndarray:
    data = np.frombuffer(bits.to_bytes(-(-n // 8), "little"), np.uint8)
    return np.unpackbits(data, count=n, bitorder="little").view(bool)


def _bits(bits: int) -> Iterable[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
