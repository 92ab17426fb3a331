"""One list of equations, as XLA sees it: whatever it inlines is written out in place.

Inner `jit`s, custom derivatives and remat are no operations of their own; loops and
branches stay. A `jax.checkpoint` that is being differentiated is what its lowering
makes of it: the recomputation, behind a barrier.
"""

from typing import Any

from jaxmem import _compat, _jaxpr
from jaxmem.scheduling._flatten import is_plain_call, opened

_CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


def written_out(closed):
    """The closed jaxpr without calls, and without what nobody needs."""

    def rule(eqn, args: list) -> list[Any] | None:
        if _is_inlined(eqn):
            return opened(eqn, args, rule)
        return None

    flat = _jaxpr.retrace(closed, lambda args: _jaxpr.evaluate(closed, args, rule))
    return _compat.without_dead_code(flat)


def _is_inlined(eqn) -> bool:
    name = eqn.primitive.name
    return name in _CUSTOM or name in _jaxpr.TAKES_OPEN_JAXPR or is_plain_call(eqn)
