"""What one device does inside a `shard_map`: looked at, or done otherwise.

A body names axes of the mesh, in collectives and in the types of its variables: it can
be retraced only where they have a meaning, so here it is while a `shard_map` is
traced. Its shapes are those of one device.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import of_variables
from jaxmem.ir.scans import is_var
from jaxmem.ir.types import ClosedJaxpr, JaxprEqn

T = TypeVar("T")


def inside_of(eqn: JaxprEqn, look: Callable[[Any], T]) -> T:
    """`look(body)` of a `shard_map` equation, its body a closed jaxpr."""
    body = jaxprs.bodies(eqn)[0]
    found: list[T] = []

    def shards(args: list) -> list[Any]:
        # here the axes of the mesh have a meaning
        found.append(look(_compat.ClosedJaxpr(body, ())))
        # the outputs are of no use, but the trace asks for the types of `eqn`
        return jaxprs.evaluate(body, args)

    run = lambda *args: _compat.shard_map_again(eqn, shards, args)
    jax.make_jaxpr(run)(*(v.aval for v in eqn.invars))
    return found[0]


def done_inside(
    eqn: JaxprEqn, args: Sequence[Any], rewritten: Callable[[Any], Any]
) -> list[Any]:
    """What a `shard_map` gives with the body `rewritten(body)`, both closed jaxprs."""

    def shards(args: list) -> list[Any]:
        body = _compat.ClosedJaxpr(jaxprs.bodies(eqn)[0], ())
        return jaxprs.evaluate(rewritten(body), args)

    return _compat.shard_map_again(eqn, shards, args)


def whole_step(closed: ClosedJaxpr) -> JaxprEqn | None:
    """The `shard_map` that is all of a step; None where there are other equations."""
    eqns = jaxprs.split(closed)[0].eqns
    return eqns[0] if len(eqns) == 1 and primitives.is_shard_map(eqns[0]) else None


def aliases_inside(
    closed: ClosedJaxpr, eqn: JaxprEqn, aliases: Mapping[int, int]
) -> dict[int, int]:
    """The aliases of a jaxpr's outputs and inputs, as positions of its `shard_map`."""
    outs = {v: k for k, v in enumerate(eqn.outvars)}
    ins = {v: k for k, v in enumerate(eqn.invars) if is_var(v)}
    pairs = of_variables(closed, aliases).items()
    return {outs[v]: ins[w] for v, w in pairs if v in outs and w in ins}
