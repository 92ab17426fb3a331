"""From an order of operations to the buffers of an arena.

Values that share bytes are one buffer: what is written over an input that dies, and a
new value of a donated argument as long as it waits for the argument to be read. Two
values alive together, by the same rule by which `profile` counts them, are in buffers
whose lifetimes overlap; so the load of the buffers is the peak of the order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxmem._checks import check_int
from jaxmem.planning._graph import Graph, checked
from jaxmem.planning.layout.buffers import Buffer


@dataclass(frozen=True)
class Lifetimes:
    """What an arena has to hold.

    Attributes:
      buffers: of at least one byte, alive from `lower` to `upper`, places in the order.
      values: value -> the id of its buffer; arguments, new values in their place and
        values of no bytes have none.
      scratch: operation -> the id of the buffer that it has while it runs.
    """

    buffers: tuple[Buffer, ...]
    values: Mapping[int, int | str]
    scratch: Mapping[int, int | str]


def lifetimes(
    graph: Graph, order: Sequence[int] | None = None, alignment: int = 1
) -> Lifetimes:
    """The buffers of a graph whose operations are done in an order.

    Args:
      graph: the graph.
      order: every operation once, inputs first; None is program order.
      alignment: bytes to a multiple of which sizes are rounded up.

    Returns:
      `Lifetimes`.

    Raises:
      ValueError: `order` is none, or `alignment` is not at least 1.
    """
    order = range(len(checked(graph).operations)) if order is None else order
    order = checked(graph).check_order(order)
    alignment = check_int("alignment", alignment, 1)
    end = _ends(graph, order)
    start: dict[int, int] = {}  # root value -> the place where its buffer begins
    until: dict[int, int] = {}  # root value -> the place after its buffer's end
    root: dict[int, int] = {}  # value -> the value whose buffer it is in
    rooms: dict[int, Buffer] = {}
    for place, i in enumerate(order):
        operation = graph.operations[i]
        over = _over(graph, i, {u for u in operation.inputs if end.get(u) == place + 1})
        for v in operation.outputs:
            if not graph.values[v].bytes or end[v] == place:
                continue
            u = over.get(v)
            root[v] = v if u is None else root[u]
            start.setdefault(root[v], place)
            until[root[v]] = end[v]
        if operation.scratch:
            size = _rounded(operation.scratch, alignment)
            rooms[i] = Buffer(f"s{i}", place, place + 1, size)
    sizes: dict[int, int] = {}
    for v, r in root.items():
        sizes[r] = max(sizes.get(r, 0), _rounded(graph.values[v].bytes, alignment))
    held = [Buffer(f"v{r}", start[r], until[r], sizes[r]) for r in start]
    return Lifetimes(
        (*held, *rooms.values()),
        {v: f"v{r}" for v, r in root.items()},
        {i: room.id for i, room in rooms.items()},
    )


def _ends(graph: Graph, order: Sequence[int]) -> dict[int, int]:
    """Value that an operation makes -> the place after the last where it has a buffer.

    For one that lies in a dead argument from the first that is where it is made.
    """
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


def _over(graph: Graph, i: int, dead: set[int]) -> dict[int, int]:
    """Output -> the input that it is written over, of those that die here."""
    outputs = set(graph.outputs)
    pairs = [
        (min(graph.values[v].bytes, graph.values[u].bytes), v, u)
        for v, u in graph.operations[i].in_place
        if u in dead and u not in outputs and v not in graph.aliases
    ]
    found: dict[int, int] = {}
    for size, v, u in sorted(pairs, key=lambda pair: -pair[0]):
        if size and v not in found and u not in found.values():
            found[v] = u
    return found


def _rounded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
