"""A list of equations in the form in which regions are looked for.

Calls are written out, every user of a mask makes it for itself, or unpacks it, and a
barrier holds one array each, so that none ties arrays of different axes.
"""

from typing import Any

from jax import lax

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.scheduling.tiling.masks import with_private_masks
from jaxmem.scheduling.tiling.packed_masks import with_packed_masks


def prepared(closed, in_scan: bool):
    """The same computation; `in_scan`: the list is the body of a scan."""
    # In a body there is nothing for XLA to merge a recomputation with, and a barrier
    # would only hold tiles together.
    written = _written_out(closed, keeps_barriers=not in_scan)
    packed = with_packed_masks(written)
    if packed is not written:
        packed = _written_out(packed, keeps_barriers=not in_scan)
    return with_private_masks(packed)


def _written_out(closed, keeps_barriers: bool):
    def rule(eqn, args: list) -> list[Any] | None:
        if primitives.is_barrier(eqn):
            return [lax.optimization_barrier(x) if keeps_barriers else x for x in args]
        if not primitives.of(eqn).calls:
            return None
        if keeps_barriers and eqn.params.get("differentiated"):
            args = [lax.optimization_barrier(x) for x in args]
        return jaxprs.evaluate(called(eqn), args, rule)

    return _compat.without_dead_code(jaxprs.rewritten(closed, rule))


def called(eqn) -> Any:
    """The body of a call; that of a custom rule is its function's, not its rule's."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in eqn.params:
            return eqn.params[name]
    raise AssertionError(eqn.primitive.name)
