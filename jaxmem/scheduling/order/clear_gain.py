"""Without a target: whether barriers that order written-out layers gain clearly.

With a target the step is compiled as given and as rewritten, and what takes less is
run. Without one no compiler can be asked, and barriers may cost: they keep XLA from
fusing, and from an order of its own. So the step's graph must show a larger gain than
the graph may be off by; otherwise a note of the plan says what was left out.
"""

from collections.abc import Mapping
from typing import Any

from jaxmem.memory import format_bytes
from jaxmem.planning import peak
from jaxmem.scheduling._pass import NAME_A_TARGET
from jaxmem.scheduling.order.updates import in_order
from jaxmem.scheduling.predict.operations import (
    as_compiled,
    compiled_peak,
    operations_of,
)

# Of the temporaries as the step is written. The graph's own are off by less than a half
# on all steps of `benchmarks.predict` for an H100 but AlexNet's with a single image.
ERROR = 0.5


def clearly_ordered(closed, aliases: Mapping[int, int]) -> tuple[Any, list[str]]:
    """(the jaxpr, in order where that gains clearly; what the plan says if not)."""
    # The step may be compiled as it is written, where updates wait for the end of the
    # backward pass: that is what order saves. XLA often finds a better order by itself,
    # in which barriers must not be larger either.
    ordered = in_order(closed, aliases)
    if ordered is closed:
        return closed, []
    graphs = [operations_of(one, aliases) for one in (closed, ordered)]
    before, after = (peak(one.graph) for one in graphs)
    xla, held = (compiled_peak(as_compiled(one)) for one in graphs)
    if before - after > ERROR * before and held <= xla:
        return ordered, []
    return closed, [_no_order(before, before - after, held - xla)]


def _no_order(before: int, gain: int, loss: int) -> str:
    saved = f"{format_bytes(max(gain, 0))} of {format_bytes(before)}"
    why = f"would save {saved} at most, and it may be off by more"
    if loss > 0:
        why = f"would take {format_bytes(loss)} more than XLA's own order"
    return (
        "layers that are written out are not put in order: by the step's graph that "
        f"{why}; {NAME_A_TARGET}"
    )
