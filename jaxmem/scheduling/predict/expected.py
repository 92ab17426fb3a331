"""What the graph of a step says of its peak, without compiling."""

from collections.abc import Mapping

from jaxmem import planning
from jaxmem.scheduling.predict.operations import (
    as_compiled,
    compiled_peak,
    operations_of,
)
from jaxmem.scheduling.predict.tpu import is_tpu

_CUTS = 4  # of the dearest operations get the bound that takes a flow


def predicted_and_bound(
    closed, aliases: Mapping[int, int], target: str
) -> tuple[int, int]:
    """Bytes of the peak as XLA's orders have it, and a bound for every order."""
    tpu = is_tpu(target)
    ops = operations_of(closed, aliases, tpu=tpu)
    graph = ops.graph
    there = graph.bytes_of(graph.arguments)
    bound = planning.lower_bound(graph, cuts=_CUTS)
    return there + compiled_peak(as_compiled(ops, tpu)), there + bound
