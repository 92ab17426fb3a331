"""The optimum by trying every order."""

import heapq
import itertools
import math

from jaxmem.planning import Graph
from jaxmem.planning._live_ranges import overwritten_bytes


class ValueWalk:
    """The bytes alive as operations run, counted value by value: a reference."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.live = 0  # bytes alive now
        self._left = [len(r) for r in graph.readers]  # reads still to come
        self._sizes = [v.bytes for v in graph.values]
        self._kept = frozenset(graph.arguments) | frozenset(graph.outputs)
        # Argument -> bytes of its new value, in a buffer of its own until it is read.
        self._waiting: dict[int, int] = {}

    def do(self, i: int) -> int:
        """Does operation `i`; the bytes alive while it runs."""
        graph, operation, left = self.graph, self.graph.operations[i], self._left
        inputs = dict.fromkeys(operation.inputs)
        for v in inputs:
            left[v] -= 1
        dead = [v for v in inputs if not left[v]]
        new = sum(map(self._placed, operation.outputs))
        during = self.live + new + operation.scratch
        if operation.in_place:
            during -= overwritten_bytes(
                (min(self._sizes[v], self._sizes[u]), v, u)
                for v, u in operation.in_place
                if not left[u] and u not in self._kept and v not in graph.aliases
            )
        for v in dead:
            new -= self._waiting.pop(v, 0) if v in self._kept else self._sizes[v]
        for v in operation.outputs:
            if not left[v] and v not in self._kept:
                new -= self._sizes[v]
        self.live += new
        return during

    def _placed(self, v: int) -> int:
        """Bytes that a new value takes; none in the buffer of a dead argument."""
        argument = self.graph.aliases.get(v)
        if argument is None:
            return self._sizes[v]
        if not self._left[argument]:
            return 0
        self._waiting[argument] = self._sizes[v]
        return self._sizes[v]


def orders(graph: Graph):
    """Every order of the operations; for about eight of them."""

    def rest(done: tuple[int, ...]):
        if len(done) == len(graph.operations):
            yield done
        for i, before in enumerate(graph.before):
            if i not in done and all(b in done for b in before):
                yield from rest((*done, i))

    return rest(())


def least(graph: Graph) -> int:
    """The lowest peak of any order."""

    def peak(order: tuple[int, ...]) -> int:
        walk = ValueWalk(graph)
        return max(map(walk.do, order), default=0)

    return min(map(peak, orders(graph)))


def cheapest(graph: Graph, budget: float) -> float:
    """The least flops of repeats within a budget, over all orders; infinite if none.

    The shortest path over (operations done at least once, values there). Whatever is
    there may be dropped at any time; what an operation reads may be dropped as it runs,
    and is written over then. For about six operations, without aliases.
    """
    size = [v.bytes for v in graph.values]
    outputs = set(graph.outputs) - set(graph.arguments)
    start = frozenset(graph.arguments)
    queue, seen, number = [(0.0, 0, frozenset(), start)], set(), itertools.count(1)
    while queue:
        cost, _, done, there = heapq.heappop(queue)
        if (done, there) in seen:
            continue
        seen.add((done, there))
        if len(done) == len(graph.operations) and outputs <= there:
            return cost
        after = [(0.0, done, there - {v}) for v in there - start]
        for i, operation in enumerate(graph.operations):
            if set(operation.inputs) <= there and (
                i not in done or operation.recomputable
            ):
                price = operation.flops if i in done else 0.0
                for left in _after(graph, size, i, there, budget):
                    after.append((price, done | {i}, left))
        for price, *state in after:
            heapq.heappush(queue, (cost + price, next(number), *state))
    return math.inf


def _after(graph: Graph, size, i: int, there: frozenset[int], budget: float):
    """What can be there after an operation, whatever of it dies as it runs."""
    operation, arguments = graph.operations[i], set(graph.arguments)
    total = there | set(operation.outputs)
    bytes_there = sum(size[v] for v in total - arguments) + operation.scratch
    inputs = set(operation.inputs) - arguments
    for count in range(len(inputs) + 1):
        for dying in itertools.combinations(inputs, count):
            pairs = [(v, u) for v, u in operation.in_place if u in dying]
            pairs.sort(key=lambda p: -min(size[p[0]], size[p[1]]))
            taken, saved = set(), 0
            for v, u in pairs:
                if not {("to", v), ("from", u)} & taken:
                    taken |= {("to", v), ("from", u)}
                    saved += min(size[v], size[u])
            if bytes_there - saved <= budget:
                yield total - set(dying)
