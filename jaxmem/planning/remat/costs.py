"""What it costs to repeat an operation."""

from collections.abc import Callable

import numpy as np

from jaxmem._checks import check_float
from jaxmem.planning._graph import Graph, Operation

Cost = Callable[[Operation], float]


def seconds(peak_flops: float = 1e15, bandwidth: float = 3.3e12) -> Cost:
    """A cost in seconds: of an operation's arithmetic, or of its traffic if slower.

    Args:
      peak_flops: floating-point operations a second.
      bandwidth: bytes a second. The defaults are about those of an H100.

    Returns:
      A function from an `Operation` to seconds.
    """
    peak_flops = check_float("peak_flops", peak_flops, above=0)
    bandwidth = check_float("bandwidth", bandwidth, above=0)
    return lambda o: max(o.flops / peak_flops, o.moved / bandwidth)


def costs_of(graph: Graph, cost: Cost) -> np.ndarray:
    """(operations,) costs."""
    costs = np.array([cost(o) for o in graph.operations], dtype=np.float64)
    bad = np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))
    if len(bad):
        name = graph.operations[bad[0]].name
        raise ValueError(
            f"cost: must be finite and at least 0; got {costs[bad[0]]} for "
            f"operations[{bad[0]}] ({name})"
        )
    return costs
