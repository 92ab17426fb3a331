"""The orders that compilers choose from: greedy ones, each found in a single pass.

These are re-implementations from descriptions and sources, to compare with. Sizes are
those of the graph. None of them looks further than one operation ahead.
"""

import heapq
from collections.abc import Callable, Iterable

from jaxmem.planning._graph import Graph, checked
from jaxmem.planning._live_ranges import LiveWalk, order_problem
from jaxmem.planning.order.ready import ReadyOperations

SCALAR = 8  # bytes: the output of an operation that makes no more than one number


def program_order(graph: Graph) -> tuple[int, ...]:
    """The operations as they are written."""
    return tuple(range(len(checked(graph).operations)))


def list_order(graph: Graph) -> tuple[int, ...]:
    """XLA's list scheduler: most bytes freed less bytes made, then most readers.

    It knows what is alive before and after an operation, not while it runs, and it
    knows nothing of donation; scratch counts as output. Scalars come first. Of equals
    the one found last runs first.

    Source: openxla/xla, xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc.
    """
    return _ListScheduler(checked(graph)).run()


class _ListScheduler:
    """Ready operations by priority; an operation is pushed anew when it changes."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self._arguments = set(graph.arguments)
        self._uses = [len(readers) for readers in graph.readers]
        for v in graph.outputs:
            self._uses[v] += 1
        self._missing = [len(b) for b in graph.before]
        self._heap: list[tuple[float, float, int, int]] = []
        self._current: dict[int, tuple[float, float]] = {}
        self._pushed = 0

    def run(self) -> tuple[int, ...]:
        for i, missing in enumerate(self._missing):
            if not missing:
                self._push(i)
        order: list[int] = []
        while self._heap:
            freed, users, _, i = heapq.heappop(self._heap)
            if self._current.get(i) == (-freed, -users):
                del self._current[i]
                order.append(i)
                self._ran(i)
        return tuple(order)

    def _ran(self, i: int) -> None:
        """Pushes what becomes ready, and what would now free an input of `i`."""
        graph, last_use = self._graph, []
        for v in dict.fromkeys(graph.operations[i].inputs):
            self._uses[v] -= 1
            if self._uses[v] == 1:
                last_use.append(v)
        for j in graph.after[i]:
            self._missing[j] -= 1
            if not self._missing[j]:
                self._push(j)
        for j in (j for v in last_use for j in graph.readers[v]):
            if j in self._current:
                self._push(j)

    def _push(self, i: int) -> None:
        priority = self._priority(i)
        if self._current.get(i) != priority:
            self._current[i] = priority
            self._pushed += 1
            heapq.heappush(self._heap, (-priority[0], -priority[1], -self._pushed, i))

    def _priority(self, i: int) -> tuple[float, float]:
        graph, operation = self._graph, self._graph.operations[i]
        made = graph.bytes_of(operation.outputs)
        if made <= SCALAR and not operation.scratch:
            return float("inf"), float("inf")
        freed = graph.bytes_of(
            v
            for v in dict.fromkeys(operation.inputs)
            if self._uses[v] == 1 and v not in self._arguments
        )
        return freed - made - operation.scratch, len(graph.after[i])


def depth_first_order(graph: Graph) -> tuple[int, ...]:
    """XLA's depth-first scheduler: post-order, inputs with most fan-out first.

    Ties go to the input with most bytes among its predecessors. Both counts are over
    paths, so they are capped, as in the source.

    Source: openxla/xla, xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc.
    """
    most = len(checked(graph).operations)
    fan, size, total = [0] * most, [0] * most, 0
    for i, operation in enumerate(graph.operations):
        own = graph.bytes_of(operation.outputs)
        total += own
        extra = max(0, len(graph.after[i]) - 1)
        fan[i] = min(most, extra + sum(fan[b] for b in graph.before[i]))
        size[i] = min(total, own + sum(size[b] for b in graph.before[i]))
    return _post_order(
        graph, lambda inputs: sorted(inputs, key=lambda i: (-fan[i], -size[i], i))
    )


def post_order(graph: Graph) -> tuple[int, ...]:
    """Depth first from the outputs, inputs in the order in which they are written."""
    return _post_order(checked(graph), list)


def _post_order(
    graph: Graph, sort: Callable[[Iterable[int]], list[int]]
) -> tuple[int, ...]:
    maker, before = graph.maker, graph.before
    ends = dict.fromkeys(maker[v] for v in graph.outputs if v in maker)
    ends |= dict.fromkeys(i for i, after in enumerate(graph.after) if not after)
    order: dict[int, None] = {}
    stack = [(i, False) for i in reversed(sort(ends))]
    while stack:
        i, visited = stack.pop()
        if i in order:
            continue
        if visited:
            order[i] = None
            continue
        stack.append((i, True))
        stack += [(b, False) for b in reversed(sort(before[i])) if b not in order]
    return tuple(order)


def least_peak_first_order(graph: Graph) -> tuple[int, ...]:
    """Inductor's order: what raises the peak least, then what leaves least alive.

    Source: pytorch, torch/_inductor/memory.py, `topological_sort_lpmf`.
    """
    operations = ReadyOperations(order_problem(checked(graph)))
    ready = _ByRise(operations.walk)
    for i in operations.start():
        ready.push(i)
    order: list[int] = []
    while ready.cost:
        i = ready.pop()
        order.append(i)
        during, new, touched = operations.do(i)
        ready.top = max(ready.top, during)
        for j in {*new, *(touched & ready.cost.keys())}:
            ready.push(j)
    return tuple(order)


class _ByRise:
    """Operations that can be done: first those within the peak so far."""

    # What an operation costs changes while it waits. It is pushed again then, and what
    # the heaps have of it besides is passed over.

    def __init__(self, walk: LiveWalk) -> None:
        self._walk = walk
        self.top = 0  # the peak so far
        self.cost: dict[int, tuple[int, int]] = {}  # (bytes during, bytes after)
        self._fits: list[tuple[int, int, int]] = []  # (after, operation, during)
        self._rises: list[tuple[int, int, int]] = []  # (during, after, operation)

    def push(self, i: int) -> None:
        self.cost[i] = during, after = self._walk.cost(i)
        if self._walk.live + during <= self.top:
            heapq.heappush(self._fits, (after, i, during))
        else:
            heapq.heappush(self._rises, (during, after, i))

    def pop(self) -> int:
        while True:
            self._move_what_fits()
            if self._fits:
                after, i, during = heapq.heappop(self._fits)
                rises = self._walk.live + during > self.top
            else:
                during, after, i = heapq.heappop(self._rises)
                rises = False
            if self.cost.get(i) != (during, after):
                continue
            if not rises:
                del self.cost[i]
                return i
            heapq.heappush(self._rises, (during, after, i))

    def _move_what_fits(self) -> None:
        """To `_fits` what no longer raises the peak."""
        while self._rises and self._walk.live + self._rises[0][0] <= self.top:
            during, after, i = heapq.heappop(self._rises)
            if self.cost.get(i) == (during, after):
                heapq.heappush(self._fits, (after, i, during))


def xla_order(graph: Graph) -> tuple[int, ...]:
    """XLA's: the best of list, depth-first and post-order; of equals the first."""
    return _best(graph, (list_order, depth_first_order, post_order))


GREEDY = (
    program_order,
    list_order,
    depth_first_order,
    post_order,
    least_peak_first_order,
)


def best_greedy(graph: Graph) -> tuple[int, ...]:
    """The order of `GREEDY` with the lowest peak; of equals the first."""
    return _best(graph, GREEDY)


def _best(
    graph: Graph, makers: Iterable[Callable[[Graph], tuple[int, ...]]]
) -> tuple[int, ...]:
    problem = order_problem(checked(graph))
    return min((make(graph) for make in makers), key=problem.peak)
