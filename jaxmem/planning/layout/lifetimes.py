"""From an order of operations to the buffers of an arena.

Two values that `profile` counts as alive together are in buffers whose lifetimes
overlap, so the load of the buffers is the peak of the order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxmem._checks import check_int
from jaxmem.planning._graph import Graph
from jaxmem.planning._live_ranges import checked_order, overwritten_pairs
from jaxmem.planning.layout.buffers import Buffer


@dataclass(frozen=True)
class Lifetimes:
    """The buffers that an arena has to hold.

    Attributes:
      buffers: of at least one byte; `lower` and `upper` are places in the order.
      values: value -> the id of its buffer. Arguments, values that are written into the
        buffer of an argument and values of no bytes have none.
      scratch: operation -> the id of the buffer that it has while it runs.
    """

    buffers: tuple[Buffer, ...]
    values: Mapping[int, int | str]
    scratch: Mapping[int, int | str]


def lifetimes(
    graph: Graph, order: Sequence[int] | None = None, alignment: int = 1
) -> Lifetimes:
    """The buffers of a graph whose operations run in an order.

    Args:
      graph: the graph.
      order: every operation once, inputs first; None is program order.
      alignment: bytes; sizes are rounded up to a multiple of it.

    Returns:
      `Lifetimes`.

    Raises:
      ValueError: `order` is no such order, or `alignment` is not at least 1.
    """
    order = checked_order(graph, order)
    alignment = check_int("alignment", alignment, 1)
    end = _ends(graph, order)
    # A buffer is named after the first value in it, its root.
    start: dict[int, int] = {}  # root -> the place where its buffer begins
    until: dict[int, int] = {}  # root -> the place after its buffer's end
    root: dict[int, int] = {}  # value -> root
    scratch: dict[int, Buffer] = {}
    for place, i in enumerate(order):
        operation = graph.operations[i]
        dying = {u for u in operation.inputs if end.get(u) == place + 1}
        overwritten = _overwritten(graph, i, dying)
        for v in operation.outputs:
            if not graph.values[v].bytes or end[v] == place:
                continue
            u = overwritten.get(v)
            root[v] = v if u is None else root[u]
            start.setdefault(root[v], place)
            until[root[v]] = end[v]
        if operation.scratch:
            size = _rounded(operation.scratch, alignment)
            scratch[i] = Buffer(f"s{i}", place, place + 1, size)
    sizes: dict[int, int] = {}
    for v, r in root.items():
        sizes[r] = max(sizes.get(r, 0), _rounded(graph.values[v].bytes, alignment))
    of_values = [Buffer(f"v{r}", start[r], until[r], sizes[r]) for r in start]
    return Lifetimes(
        (*of_values, *scratch.values()),
        {v: f"v{r}" for v, r in root.items()},
        {i: buffer.id for i, buffer in scratch.items()},
    )


def _ends(graph: Graph, order: Sequence[int]) -> dict[int, int]:
    """Value that is made -> the place after the last at which it has a buffer."""
    # A value that is written into a dead argument at once ends where it is made.
    places = {i: place for place, i in enumerate(order)}
    outputs = set(graph.outputs)
    last = {
        v: 1 + max((places[r] for r in readers), default=-1)
        for v, readers in enumerate(graph.readers)
    }
    ends = {}
    for v, maker in graph.maker.items():
        made = places[maker]
        if v in graph.aliases:
            argument = last[graph.aliases[v]]
            ends[v] = argument if argument > made + 1 else made
        else:
            ends[v] = len(order) if v in outputs else max(last[v], made + 1)
    return ends


def _overwritten(graph: Graph, i: int, dying: set[int]) -> dict[int, int]:
    """Output -> the input that it overwrites, of those that die here."""
    outputs = set(graph.outputs)
    pairs = [
        (min(graph.values[v].bytes, graph.values[u].bytes), v, u)
        for v, u in graph.operations[i].in_place
        if u in dying and u not in outputs and v not in graph.aliases
    ]
    return {v: u for size, v, u in overwritten_pairs(pairs) if size}


def _rounded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
