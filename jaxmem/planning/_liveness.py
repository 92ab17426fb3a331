"""Which values are alive when, and what they take together.

What is alive after some operations depends on which have been done, not on their order;
so the bytes of an order are a walk over sets, which is what the searches rely on.
"""

from collections.abc import Iterable, Sequence

from jaxmem.planning._graph import Graph, checked


def profile(graph: Graph, order: Sequence[int] | None = None) -> list[int]:
    """Bytes alive while each operation runs, arguments not counted.

    While an operation runs there are: what was alive before, what it makes, and its
    scratch; less what it may write over (`Operation.in_place`).

    Args:
      graph: the graph.
      order: every operation once, inputs first; None is program order.

    Returns:
      One figure an operation, in this order.

    Raises:
      ValueError: `order` is none.
    """
    if order is None:
        order = range(len(checked(graph).operations))
    else:
        order = checked(graph).check_order(order)
    return walked(graph, order)


def peak(graph: Graph, order: Sequence[int] | None = None) -> int:
    """The largest figure of `profile`; 0 for a graph without operations."""
    return max(profile(graph, order), default=0)


def walked(graph: Graph, order: Iterable[int]) -> list[int]:
    """`profile` of an order that is known to be one."""
    walk = Walk(graph)
    return [walk.do(i) for i in order]


class Walk:
    """The bytes alive as operations are done one after another."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.live = 0  # bytes alive now
        self._left = [len(r) for r in graph.readers]  # reads still to come
        self._sizes = [v.bytes for v in graph.values]
        self._kept = frozenset(graph.arguments) | frozenset(graph.outputs)
        # argument -> bytes of its new value, which waits elsewhere till it is read
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
            during -= written_over(
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


def written_over(pairs: Iterable[tuple[int, int, int]]) -> int:
    """Bytes saved by (bytes, output, input) pairs, each output and input once.

    The largest first: with more to choose from it never saves less.
    """
    saved, outputs, inputs = 0, set(), set()
    for size, v, u in sorted(pairs, key=lambda pair: -pair[0]):
        if v not in outputs and u not in inputs:
            saved += size
            outputs.add(v)
            inputs.add(u)
    return saved
