"""A graph as the searches for an order see it, forward or backward in time.

Each value that takes bytes is a *piece*: it is there once one of its `tails` is done
and until all of its `heads` are. A value is a piece whose tail makes it and whose heads
read it; an output that will lie in a donated argument waits elsewhere till the
argument's last reader. So the bytes alive are a cut function of the set of operations
that have been done, and a cut function is submodular: what an operation adds to them
gets less, never more, as others are done. The searches rest on that.

Undoing a graph from its end is the same kind of problem with tails and heads exchanged,
which is why a piece may have several tails. Every order has the same peak both ways.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxmem.planning._graph import Graph
from jaxmem.planning._liveness import written_over


@dataclass(frozen=True)
class LiveRange:
    """Bytes that are there from a tail on until the last head.

    Attributes:
      size: bytes, more than 0.
      tails: the operations that bring it; empty if it is there at the start.
      heads: the operations that it waits for; empty if it stays to the end.
    """

    size: int
    tails: tuple[int, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True)
class OrderProblem:
    """Operations to put in order, and the pieces they bring and end.

    Attributes:
      before: operation -> those that must be done before it.
      after: operation -> those that must be done after it.
      pieces: all that changes; what is there from start to end is in `base`.
      extra: operation -> bytes that it holds only while it runs.
      over: operation -> (bytes, output, piece): what it saves if this piece changes by
        it, each output and piece once, most bytes first.
      base: bytes alive at the start.
    """

    before: Sequence[tuple[int, ...]]
    after: Sequence[tuple[int, ...]]
    pieces: Sequence[LiveRange]
    extra: Sequence[int]
    over: Sequence[tuple[tuple[int, int, int], ...]]
    base: int = 0

    def __len__(self) -> int:
        return len(self.before)

    @cached_property
    def brings(self) -> list[list[int]]:
        """Operation -> the pieces of which it is a tail."""
        return _by_operation(len(self), (p.tails for p in self.pieces))

    @cached_property
    def ends(self) -> list[list[int]]:
        """Operation -> the pieces of which it is a head."""
        return _by_operation(len(self), (p.heads for p in self.pieces))

    @cached_property
    def final(self) -> int:
        """Bytes alive at the end."""
        brought = sum(p.size for p in self.pieces if not p.heads)
        return self.base + brought - sum(p.size for p in self.pieces if not p.tails)

    @cached_property
    def reversed(self) -> "OrderProblem":
        """The same operations undone from the end."""
        return OrderProblem(
            self.after,
            self.before,
            [LiveRange(p.size, p.heads, p.tails) for p in self.pieces],
            self.extra,
            self.over,
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
        """What is the same for two problems that differ in nothing but `base`."""
        pieces = tuple((p.size, p.tails, p.heads) for p in self.pieces)
        before = tuple(map(tuple, self.before))
        return before, pieces, tuple(self.extra), tuple(self.over)


def _by_operation(n: int, sides: Iterable[tuple[int, ...]]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(n)]
    for k, operations in enumerate(sides):
        for i in operations:
            found[i].append(k)
    return found


def order_problem(graph: Graph) -> OrderProblem:
    """The graph's operations, all of them, as a problem."""
    outputs = set(graph.outputs)
    pieces, piece_of = [], {}
    extra = [operation.scratch for operation in graph.operations]
    for v, maker in graph.maker.items():
        size, heads = graph.values[v].bytes, graph.readers[v]
        if v in graph.aliases:
            heads = tuple(i for i in graph.readers[graph.aliases[v]] if i != maker)
            if not heads:
                continue
        elif v in outputs:
            heads = ()
        elif not heads:
            extra[maker] += size
            continue
        if size:
            piece_of[v] = len(pieces)
            pieces.append(LiveRange(size, (maker,), heads))
    over = []
    for operation in graph.operations:
        pairs = [
            (min(graph.values[v].bytes, graph.values[u].bytes), v, piece_of[u])
            for v, u in operation.in_place
            if u in piece_of and u not in outputs and v not in graph.aliases
        ]
        over.append(tuple(sorted((p for p in pairs if p[0]), key=lambda p: -p[0])))
    return OrderProblem(graph.before, graph.after, pieces, extra, over)


class LiveWalk:
    """The bytes alive as operations are done one after another."""

    def __init__(self, problem: OrderProblem):
        self.problem = problem
        self.live = problem.base
        self.brought = [int(not p.tails) for p in problem.pieces]  # tails done
        self.waits = [len(p.heads) or 1 for p in problem.pieces]  # heads not done
        self._sizes = [p.size for p in problem.pieces]
        self._brings, self._ends = problem.brings, problem.ends

    def cost(self, i: int) -> tuple[int, int]:
        """Bytes above `live` while `i` runs, and after it."""
        brought, waits, sizes = self.brought, self.waits, self._sizes
        new = [k for k in self._brings[i] if not brought[k] and waits[k]]
        gone = [k for k in self._ends[i] if waits[k] == 1 and brought[k]]
        more = sum([sizes[k] for k in new])
        during = more + self.problem.extra[i]
        if over := self.problem.over[i]:
            during -= written_over(p for p in over if p[2] in new or p[2] in gone)
        return during, more - sum([sizes[k] for k in gone])

    def do(self, i: int) -> int:
        """Does operation `i`; the bytes alive while it runs."""
        during, after = self.cost(i)
        during += self.live
        self.live += after
        for k in self._brings[i]:
            self.brought[k] += 1
        for k in self._ends[i]:
            self.waits[k] -= 1
        return during

    def undo(self, i: int) -> None:
        """Takes back `i`, the last operation that was done."""
        for k in self._brings[i]:
            self.brought[k] -= 1
        for k in self._ends[i]:
            self.waits[k] += 1
        self.live -= self.cost(i)[1]

    def rest(self, chosen: Sequence[int]) -> OrderProblem:
        """The problem of doing `chosen` next, numbered as they stand there.

        All that they need must be among them, or done.
        """
        problem, number = self.problem, {i: n for n, i in enumerate(chosen)}
        touched = {k for i in chosen for k in (*self._brings[i], *self._ends[i])}
        found = {}
        for k in touched:
            piece = problem.pieces[k]
            tails = tuple(number[i] for i in piece.tails if i in number)
            heads = tuple(number[i] for i in piece.heads if i in number)
            there = self.brought[k] > 0
            stays = len(heads) < self.waits[k]
            if self.waits[k] and (tails or there) and not (there and stays):
                tails, heads = () if there else tails, () if stays else heads
                found[k] = LiveRange(piece.size, tails, heads)
        rank = {k: (p.tails, p.heads, p.size) for k, p in found.items()}
        place = {k: n for n, k in enumerate(sorted(found, key=lambda k: rank[k]))}
        return OrderProblem(
            [_renumbered(problem.before[i], number) for i in chosen],
            [_renumbered(problem.after[i], number) for i in chosen],
            [found[k] for k in place],
            [problem.extra[i] for i in chosen],
            [_pairs(problem.over[i], place) for i in chosen],
            self.live,
        )


def _renumbered(operations: Iterable[int], number: Mapping[int, int]) -> tuple:
    return tuple(sorted(number[i] for i in operations if i in number))


def _pairs(over: Iterable[tuple[int, int, int]], place: Mapping[int, int]) -> tuple:
    """Those whose piece can change; outputs are numbered as they come."""
    outputs: dict[int, int] = {}
    return tuple(
        (size, outputs.setdefault(v, len(outputs)), place[k])
        for size, v, k in over
        if k in place
    )
