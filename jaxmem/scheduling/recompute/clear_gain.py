"""Without a target: whether a backward scan gains clearly by recomputing residuals.

With a target the step is compiled as given and as rewritten, and what takes less is
run. Without one no compiler can be asked, and a backward scan that recomputes its
residuals may hold one more array of a layer at once: it has to gain more than that.
"""

from collections.abc import Iterable, Iterator

from jaxmem.ir import jaxprs
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.scans import is_var, size_of
from jaxmem.memory import format_bytes
from jaxmem.scheduling._pass import NAME_A_TARGET
from jaxmem.scheduling.plan.rows import nbytes
from jaxmem.scheduling.recompute.pair_rewrite import PairRewrite


def clear_gain(closed, plan: PairRewrite) -> bool:
    """Whether residuals that are not kept take more than an array of one layer."""
    # The compiler's order inside the backward scan may hold one more of them at once.
    return _saved(plan) > _array_of_a_layer(closed, plan)


def unclear_gains(closed, rewrites: Iterable[PairRewrite]) -> Iterator[str]:
    """A sentence for each pair of scans whose residuals are left as they are."""
    for plan in rewrites:
        saved, array = _saved(plan), _array_of_a_layer(closed, plan)
        yield (
            f"{format_bytes(saved)} of residuals are kept that the backward scan could "
            f"recompute: in XLA's order it may then hold one more array of a layer, "
            f"{format_bytes(array)}; {NAME_A_TARGET}"
        )


def _saved(plan: PairRewrite) -> int:
    return sum(sign * nbytes(aval) for aval, _, _, sign in plan.described())


def _array_of_a_layer(closed, plan: PairRewrite) -> int:
    """Bytes of the largest array that the backward scan's body reads or makes."""
    eqn = JaxprGraph(closed).eqns[plan.pair.backward]
    body = jaxprs.split(eqn.params["jaxpr"])[0]
    arrays = (v for e in jaxprs.walk(body) for v in [*e.invars, *e.outvars])
    return max((size_of(v) for v in arrays if is_var(v)), default=0)
