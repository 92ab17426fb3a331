"""The orders that compilers choose from: greedy ones, each of a single pass.

Re-implementations from descriptions and sources, to compare with; sizes are those of
the graph. None of them looks further than one operation ahead.
"""

import heapq
from collections.abc import Callable, Iterable

from jaxmem.planning._graph import Graph, checked
from jaxmem.planning._live_ranges import order_problem
from jaxmem.planning._liveness import walked
from jaxmem.planning.order.ready import ReadyOperations

SCALAR = 8  # bytes: an operation that makes no more than one number


def program_order(graph: Graph) -> tuple[int, ...]:
    """As it is written."""
    return tuple(range(len(checked(graph).operations)))


def list_order(graph: Graph) -> tuple[int, ...]:
    """XLA's list scheduler: most bytes freed less bytes made, then most readers.

    It knows what is alive before and after an operation, not while it runs, and nothing
    of donation; scratch counts as made. Scalars come first. Of equals the last found.

    Source: openxla/xla, xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc.
    """
    sizes, arguments = [v.bytes for v in checked(graph).values], set(graph.arguments)
    uses = [len(readers) for readers in graph.readers]
    for v in graph.outputs:
        uses[v] += 1
    missing = [len(b) for b in graph.before]

    def priority(i: int) -> tuple[float, float]:
        operation = graph.operations[i]
        made = graph.bytes_of(operation.outputs)
        if made <= SCALAR and not operation.scratch:
            return float("inf"), float("inf")
        inputs = dict.fromkeys(operation.inputs)
        freed = sum(sizes[v] for v in inputs if uses[v] == 1 and v not in arguments)
        return freed - made - operation.scratch, len(graph.after[i])

    heap: list[tuple[float, float, int, int]] = []
    current: dict[int, tuple[float, float]] = {}
    count = 0

    def push(i: int) -> None:
        nonlocal count
        new = priority(i)
        if current.get(i) != new:
            current[i], count = new, count - 1
            heapq.heappush(heap, (-new[0], -new[1], count, i))

    for i, b in enumerate(missing):
        if not b:
            push(i)
    order: list[int] = []
    while heap:
        freed, users, _, i = heapq.heappop(heap)
        if current.get(i) != (-freed, -users):
            continue
        del current[i]
        order.append(i)
        last = []
        for v in dict.fromkeys(graph.operations[i].inputs):
            uses[v] -= 1
            if uses[v] == 1:
                last.append(v)
        for j in graph.after[i]:
            missing[j] -= 1
            if not missing[j]:
                push(j)
        for v in last:
            for j in graph.readers[v]:
                if j in current:
                    push(j)
    return tuple(order)


def depth_first_order(graph: Graph) -> tuple[int, ...]:
    """XLA's depth-first scheduler: post-order, inputs with most fan-out behind first.

    Ties go to the input with most bytes behind it; both counts go over paths, so they
    are capped, as in the source.

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
        graph, lambda found: sorted(found, key=lambda i: (-fan[i], -size[i], i))
    )


def post_order(graph: Graph) -> tuple[int, ...]:
    """Depth first from the outputs, inputs as they are written."""
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
    """Inductor's: what raises the peak least, then what leaves least alive.

    Source: pytorch, torch/_inductor/memory.py, `topological_sort_lpmf`.
    """
    front = ReadyOperations(order_problem(checked(graph)))
    walk, top = front.walk, 0
    fits: list[tuple[int, int, int]] = []  # (bytes after, operation, during)
    rises: list[tuple[int, int, int]] = []  # (during, bytes after, operation)
    ready: dict[int, tuple[int, int]] = {}

    def push(i: int) -> None:
        ready[i] = during, after = walk.cost(i)
        if walk.live + during <= top:
            heapq.heappush(fits, (after, i, during))
        else:
            heapq.heappush(rises, (during, after, i))

    for i in front.start():
        push(i)
    order: list[int] = []
    while ready:
        while rises and walk.live + rises[0][0] <= top:
            during, after, i = heapq.heappop(rises)
            if ready.get(i) == (during, after):
                heapq.heappush(fits, (after, i, during))
        if fits:
            after, i, during = heapq.heappop(fits)
            if ready.get(i) != (during, after):
                continue
            if walk.live + during > top:
                heapq.heappush(rises, (during, after, i))
                continue
        else:
            during, after, i = heapq.heappop(rises)
            if ready.get(i) != (during, after):
                continue
        del ready[i]
        order.append(i)
        during, new, touched = front.do(i)
        top = max(top, during)
        for j in {*new, *(touched & ready.keys())}:
            push(j)
    return tuple(order)


def xla_order(graph: Graph) -> tuple[int, ...]:
    """What XLA takes: the best of list, depth-first and post-order; of equals that."""
    return _best(graph, (list_order, depth_first_order, post_order))


GREEDY = (
    program_order,
    list_order,
    depth_first_order,
    post_order,
    least_peak_first_order,
)


def best_greedy(graph: Graph) -> tuple[int, ...]:
    """The order with the lowest peak of all in this file; of equals the first."""
    return _best(graph, GREEDY)


def _best(
    graph: Graph, makers: Iterable[Callable[[Graph], tuple[int, ...]]]
) -> tuple[int, ...]:
    orders = (make(graph) for make in makers)
    return min(orders, key=lambda o: max(walked(graph, o), default=0))
