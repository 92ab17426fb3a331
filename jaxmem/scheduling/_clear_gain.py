"""Without a target: only what the step's graph shows to gain more than it may be off.

With a target the step is compiled as given and as rewritten, and what takes less is
run. Without one nobody can be asked, and two of the rewrites may cost: barriers that
put written-out layers in order keep XLA from fusing and from an order of its own, and
a backward scan that makes its residuals may hold an array of a layer more at once. So
each has to gain more than that. What is left out, and how much it would have gained,
is said in the plan's notes.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxmem import _jaxpr
from jaxmem.memory import format_bytes
from jaxmem.planning import peak
from jaxmem.scheduling._graph import Graph
from jaxmem.scheduling._operations import as_compiled, compiled_peak, operations_of
from jaxmem.scheduling._order import in_order
from jaxmem.scheduling._scan_residuals import Remake
from jaxmem.scheduling._scans import is_var, size_of

# Of the temporaries as the step is written. The graph's own are off by less than a half
# on all steps of `benchmarks.predict` for an H100 but AlexNet's with a single image.
ERROR = 0.5
_INSTEAD = "name a target, and both are compiled and the smaller is run"


def clearly_ordered(closed, aliases: Mapping[int, int]) -> tuple[Any, list[str]]:
    """(the jaxpr, in order where that gains clearly; what the plan says if not).

    The step may be compiled as it is written, where updates wait for the end of the
    backward pass: that is what order saves. XLA often finds a better order by itself,
    in which barriers must not be larger either.
    """
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
        f"{why}; {_INSTEAD}"
    )


def gains_clearly(closed, plan: Remake) -> bool:
    """Whether residuals that are not kept take more than an array of one layer.

    The compiler's order inside the backward scan may hold one more of them at once.
    """
    return _saved(plan) > _array_of_a_layer(closed, plan)


def not_made(closed, plans: Iterator[Remake]) -> Iterator[str]:
    """A sentence for each pair of scans whose residuals are left as they are."""
    for plan in plans:
        saved, array = _saved(plan), _array_of_a_layer(closed, plan)
        yield (
            f"{format_bytes(saved)} of residuals are kept that the backward scan could "
            f"make: in XLA's order it may then hold one more array of a layer, "
            f"{format_bytes(array)}; {_INSTEAD}"
        )


def _saved(plan: Remake) -> int:
    rows = plan.described()
    sizes = ((_jaxpr.elements(a.shape) * a.dtype.itemsize, n) for a, _, _, n in rows)
    return sum(size * sign for size, sign in sizes)


def _array_of_a_layer(closed, plan: Remake) -> int:
    """Bytes of the largest array that the backward scan's body reads or makes."""
    eqn = Graph(closed).eqns[plan.pair.backward]
    body = _jaxpr.split(eqn.params["jaxpr"])[0]
    made = (v for e in _jaxpr.walk(body) for v in [*e.invars, *e.outvars])
    return max((size_of(v) for v in made if is_var(v)), default=0)
