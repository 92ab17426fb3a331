"""What a step will take, without compiling it: from the graph of its jaxpr.

XLA takes the best of three greedy orders; so does the prediction, for the step and for
the inside of each loop. For a GPU products are merged before (`products.py`). Copies,
workspaces, padding and fragmentation are not in it: but for convolutions, not that to a
TPU's tiles either.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxmem._checks import check_callable, check_donated, check_static, wrong_type
from jaxmem.chips import get_target, traced_for
from jaxmem.frameworks import pure_call
from jaxmem.ir import jaxprs
from jaxmem.ir.auto_axes import on_auto_axes
from jaxmem.ir.graph import by_shape
from jaxmem.ir.shards import InputShardings, of_shardings
from jaxmem.planning import Graph, peak
from jaxmem.scheduling._arguments import abstract, check_fixed_sizes, positions
from jaxmem.scheduling._shardings import argument_shardings, placed, with_results_placed
from jaxmem.scheduling.predict.dilated import with_dilated_inputs
from jaxmem.scheduling.predict.operations import (
    as_compiled,
    compiled_peak,
    operations_of,
)
from jaxmem.scheduling.predict.tpu import is_tpu


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
        """Arguments, outputs and temporaries, as `MemoryReport.peak_bytes` counts."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes


def predict(
    fn: Callable,
    *args: Any,
    target: str = "h100",
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    **kwargs: Any,
) -> Prediction:
    """Predicts what a step takes on a chip; nothing is compiled, nothing allocated.

    Args:
      fn: the step, jitted or not; a jitted one brings its donated arguments along.
      *args: arrays or `jax.ShapeDtypeStruct`, in any pytrees.
      target: the chip's name, one of `jaxmem.targets()`. The compiler for it need not
        be installed; GPUs are all alike here, and TPUs are.
      donate_argnums: positional arguments whose buffers the step may reuse.
      donate_argnames: the same for keyword arguments.
      static_argnums: positional arguments that are Python values, not arrays.
      static_argnames: the same for keyword arguments.
      **kwargs: the step's keyword arguments.

    Returns:
      A `Prediction`. `python -m benchmarks.predict` holds its peak against the
      compilers for H100 and TPU; `jaxmem.estimate` gives the compiler's own figure.

    Raises:
      ValueError: no chip has this name.

    Example::

      print(jaxmem.scheduling.predict(step, state, batch, target="h100").peak_bytes)
    """
    check_callable("fn", fn)
    if target is None:
        raise wrong_type("target", target, "a name of jaxmem.targets()")
    tpu = is_tpu(target)
    donate = check_donated(donate_argnums, donate_argnames)
    static = check_static(static_argnums, static_argnames)
    own = fn, args, kwargs, donate or None, static
    with traced_for(get_target(target, check=False)), pure_call(*own) as call:
        args, kwargs = abstract(call.args), abstract(call.kwargs)
        check_fixed_sizes("predict", (args, kwargs))
        traced = jaxprs.trace(call.form.pure(fn), *args, **kwargs)
    donated = positions(args, kwargs, call.form.donated)
    # a jitted step's own shardings: else what it shards itself counts in full
    step = placed(traced)
    shardings = of_shardings(step.jaxpr, argument_shardings((args, kwargs), step.ins))
    with on_auto_axes():
        closed = with_results_placed(step.jaxpr, step.outs)
        return predicted(closed, by_shape(closed, donated), tpu, shardings)


def predicted(
    closed,
    aliases: Mapping[int, int] | None = None,
    tpu: bool = False,
    shardings: InputShardings | None = None,
) -> Prediction:
    """The same for a closed jaxpr; `aliases`: output -> donated input, by position."""
    written = with_dilated_inputs(closed, tpu)
    ops = operations_of(written, aliases, tpu=tpu, shardings=shardings)
    graph = ops.graph
    # reports count what is returned outside of donated arguments by itself
    apart = set(graph.outputs) - graph.aliases.keys()
    return Prediction(
        graph.bytes_of(graph.arguments),
        graph.bytes_of(apart),
        compiled_peak(_without(as_compiled(ops, tpu), apart)),
        # as it is written: nothing is merged, which is XLA's doing
        peak(_without(graph, apart)),
    )


def _without(graph: Graph, apart: set[int]) -> Graph:
    """The graph with some values counted nowhere."""
    numbered = enumerate(graph.values)
    values = (replace(v, bytes=0) if n in apart else v for n, v in numbered)
    return replace(graph, values=tuple(values))


def predicted_peak(
    closed, aliases: Mapping[int, int], target: str, shardings: InputShardings | None
) -> int:
    """Bytes of the peak as XLA's orders have it."""
    tpu = is_tpu(target)
    written = with_dilated_inputs(closed, tpu)
    ops = operations_of(written, aliases, tpu=tpu, shardings=shardings)
    graph = ops.graph
    return graph.bytes_of(graph.arguments) + compiled_peak(as_compiled(ops, tpu))
