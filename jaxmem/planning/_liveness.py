"""The bytes alive while each operation runs."""

from collections.abc import Iterable, Sequence

from jaxmem.planning._graph import Graph, checked
from jaxmem.planning._live_ranges import order_problem


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
    return valid_profile(graph, checked_order(graph, order))


def peak(graph: Graph, order: Sequence[int] | None = None) -> int:
    """The largest figure of `profile`; 0 for a graph without operations."""
    return max(profile(graph, order), default=0)


def checked_order(graph: Graph, order: Sequence[int] | None) -> Sequence[int]:
    """The order, checked; program order for None."""
    if order is None:
        return range(len(checked(graph).operations))
    return checked(graph).check_order(order)


def valid_profile(graph: Graph, order: Iterable[int]) -> list[int]:
    """`profile` of an order that is known to be valid."""
    return order_problem(graph).profile(order)
