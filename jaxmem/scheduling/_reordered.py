"""Operations outside of loops, in the order of the least peak."""

from collections.abc import Mapping

from jaxmem import planning
from jaxmem.scheduling._operations import operations_of
from jaxmem.scheduling._operations_order import fences_of, in_given_order

PATIENCE = 40.0  # seconds


def reordered(closed, aliases: Mapping[int, int]):
    """The jaxpr in the order that `planning.order` finds, with barriers to keep it."""
    ops = operations_of(closed, aliases)
    order = planning.order(ops.graph, time_limit=PATIENCE).operations
    return in_given_order(ops, order, fences_of(ops.graph, order))
