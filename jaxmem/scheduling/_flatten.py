"""One list of equations: what hides the backward scan or the update is opened."""

from collections.abc import Callable
from typing import Any

from jaxmem import _compat, _jaxpr
from jaxmem.scheduling._scans import barrier


def flatten(closed):
    """The jaxpr with inner `jit`s, and remat round a whole loss, written out in place.

    A `jax.checkpoint` that is being differentiated is what its lowering makes of it:
    the recomputation, behind a barrier.
    """

    def rule(eqn, args: list) -> list[Any] | None:
        if is_plain_call(eqn) or _hides_backward_scan(eqn):
            return opened(eqn, args, rule)
        if eqn.primitive.name == "scan":
            bodies = [flatten(body) for body in _jaxpr.bodies(eqn)]
            return _jaxpr.rebind(eqn, args, bodies)
        return None

    flat = _jaxpr.retrace(closed, lambda args: _jaxpr.evaluate(closed, args, rule))
    return _compat.without_dead_code(flat)


def opened(eqn, args: list, rule: Callable) -> list[Any]:
    """The outputs of a call whose equations are written out in its place."""

    def run(eqn, args: list) -> list[Any]:
        if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
            args = barrier(args)
        return _jaxpr.evaluate(_jaxpr.bodies(eqn)[0], args, rule)

    return _compat.in_context_of(eqn, run, eqn, args)


def is_plain_call(eqn) -> bool:
    """Whether an equation is a call that XLA inlines and that names no sharding."""
    if eqn.primitive.name in ("closed_call", "core_call", "eval_jaxpr"):
        return True
    if eqn.primitive.name not in ("jit", "pjit"):
        return False
    shardings = [*eqn.params["in_shardings"], *eqn.params["out_shardings"]]
    return all(_compat.is_unspecified(s) for s in shardings)


def _hides_backward_scan(eqn) -> bool:
    if eqn.primitive.name not in _jaxpr.TAKES_OPEN_JAXPR:
        return False
    if not eqn.params["differentiated"]:
        return False
    return any(
        e.primitive.name == "scan" and e.params["reverse"]
        for e in _jaxpr.walk(_jaxpr.bodies(eqn)[0])
    )
