"""A step without its `jax.debug.print`s and `jax.debug.callback`s.

They give no values, so all others stay what they are. For a chip that is not there no
callback can be compiled: what is measured is the step without them.
"""

from typing import Any

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives


def prints_in(body: Any) -> int:
    """How many there are in a jaxpr and in the bodies in it."""
    return sum(primitives.is_print(eqn) for eqn in jaxprs.walk(body))


def without_prints(closed: Any) -> Any:
    """The closed jaxpr without them."""
    return jaxprs.rewritten(closed, _rule)


def _rule(eqn: Any, args: list[Any]) -> list[Any] | None:
    if primitives.is_print(eqn):
        return []
    bodies = jaxprs.bodies(eqn)
    if not any(map(prints_in, bodies)):
        return None
    if primitives.is_shard_map(eqn):  # its axes have a meaning inside alone
        body = _compat.ClosedJaxpr(bodies[0], ())
        shards = lambda args: jaxprs.evaluate(body, args, _rule)
        return _compat.shard_map_again(eqn, shards, args)
    return jaxprs.rebind(eqn, args, list(map(_closed_without, bodies)))


def _closed_without(body: Any) -> Any:
    jaxpr, consts = jaxprs.split(body)
    return without_prints(_compat.ClosedJaxpr(jaxpr, consts))
