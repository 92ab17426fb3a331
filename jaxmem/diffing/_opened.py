"""A jaxpr whose calls are written out: loops and branches alone have bodies."""

from typing import Any

import jax

from jaxmem import _compat
from jaxmem.ir import flatten, jaxprs, primitives
from jaxmem.ir.primitives import Kind

_OPEN = Kind.CALL, Kind.JIT, Kind.CUSTOM_JVP, Kind.CUSTOM_VJP, Kind.REMAT


def opened(closed: Any) -> Any:
    """The closed jaxpr as XLA gets it: without calls, and without dead code."""
    # No derivative is taken any more: a `jax.checkpoint` is its barrier and its body.
    return _compat.without_dead_code(jaxprs.rewritten(closed, _rule))


def _rule(eqn: Any, args: list) -> list | None:
    if (made := _compat.expanded(eqn, args)) is not None:
        return made
    if primitives.is_sum(eqn):  # one name for `add` and for that of derivatives
        return [jax.lax.add(*args)]
    if primitives.is_named(eqn) or primitives.is_transfer(eqn):
        return args
    if primitives.of(eqn).kind in _OPEN and jaxprs.called(eqn) is not None:
        if not primitives.is_jit(eqn) or flatten.is_plain_call(eqn):
            return flatten.opened(eqn, args, _rule)
    if primitives.is_loop(eqn) or primitives.is_branch(eqn):
        bodies = [opened(body) for body in jaxprs.bodies(eqn)]
        return jaxprs.rebind(eqn, args, bodies)
    return None
