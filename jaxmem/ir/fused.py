"""What costs nothing: it is done inside of what reads it, or is looked up."""

from jaxmem import _compat
from jaxmem.ir import primitives
from jaxmem.ir.jaxprs import elements
from jaxmem.ir.part_marks import innermost_operations
from jaxmem.ir.types import JaxprEqn


def fused_only(eqn: JaxprEqn, sent: float = 0.0) -> float | None:
    """A price at which only what costs very little is recomputed."""
    free = lambda e: primitives.of(e).fused or is_lookup(e)
    fused = all(map(free, innermost_operations(eqn))) and not sent
    return 0.0 if fused and not _compat.has_side_effects(eqn) else None


def is_fused(eqn: JaxprEqn) -> bool:
    """Whether an equation is done inside of what reads its result."""
    return primitives.of(eqn).fused or primitives.is_barrier(eqn)


def is_lookup(eqn: JaxprEqn) -> bool:
    """Whether codes are looked up in a table of a byte's values, as NF4's sixteen."""
    if not primitives.is_gather(eqn):
        return False
    table, codes = (elements(v.aval.shape) for v in eqn.invars[:2])
    return table <= min(256, codes)
