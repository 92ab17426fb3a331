"""What a step will take, without compiling it: from the graph of its jaxpr.

XLA takes the best of three greedy orders; so does the prediction, for the step and for
the inside of each loop. Copies, workspaces, padding and fragmentation are not in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxmem.planning import Graph, peak
from jaxmem.planning._greedy import depth_first_order, list_order, post_order
from jaxmem.scheduling._operations import operations_of


@dataclass(frozen=True)
class Prediction:
    """The bytes of a step, as its graph has them.

    Attributes:
      argument_bytes: what it is given.
      output_bytes: what it gives back outside of donated arguments.
      temp_bytes: the rest of what is alive at the peak, in the order of XLA.
      program_bytes: the same in the order in which the step is written.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    program_bytes: int

    @property
    def peak_bytes(self) -> int:
        """All together, as `MemoryReport.peak_bytes` counts."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes


def predict(closed, aliases: Mapping[int, int] | None = None) -> Prediction:
    """Predicts the bytes of a closed jaxpr on a GPU, without compiling it.

    Args:
      closed: the jaxpr of a step.
      aliases: position of an output -> of the donated input in whose memory it lies.

    Returns:
      A `Prediction`.
    """
    graph = operations_of(closed, aliases, compiled_peak).graph
    apart = _outputs_apart(graph)
    made = sum(
        graph.values[v].bytes for v in graph.outputs if v not in graph.aliases
    )
    return Prediction(
        graph.bytes_of(graph.arguments),
        made,
        compiled_peak(apart),
        peak(apart),
    )


def _outputs_apart(graph: Graph) -> Graph:
    """The graph with results that have a place of their own counted nowhere."""
    apart = set(graph.outputs) - graph.aliases.keys()
    values = (replace(v, bytes=0) if n in apart else v for n, v in enumerate(graph.values))
    return replace(graph, values=tuple(values))


def compiled_peak(graph: Graph) -> int:
    """The peak of a graph in the order that XLA would choose.

    The best of list, depth-first and post-order.
    """
    orders = (order(graph) for order in (list_order, depth_first_order, post_order))
    return min(peak(graph, order) for order in orders)
