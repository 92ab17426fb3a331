"""Sums that are carried from part to part, in float32 where the array is narrower."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxmem import _compat
from jaxmem.cost.parts import wide
from jaxmem.ir import primitives
from jaxmem.ir.graph import JaxprGraph


# Linear and cheap: done to each part of a sum, so that the sum has its final layout.
# Else XLA transposes the whole sum behind the loop, and it is there twice.
def is_move(eqn) -> bool:
    """Whether it is done to each part of a sum."""
    return primitives.is_cast(eqn) or turns(eqn)


def turns(eqn) -> bool:
    """Whether it transposes or negates, and leaves the dtype."""
    return eqn.primitive.name in ("transpose", "neg")


def moves_behind(
    graph: JaxprGraph, v, others: Collection[int] = ()
) -> tuple[list[int], Any]:
    """What moves or casts a sum, and is all that reads it.

    Args:
      graph: the list of equations.
      v: the sum.
      others: positions of equations that are not looked at.

    Returns:
      Positions of equations one behind the other, and the variable that they give.
    """
    found: list[int] = []
    while v not in graph.outputs and len(graph.users.get(v, ())) == 1:
        (k,) = graph.users[v]
        (out, *_) = graph.eqns[k].outvars
        floating = jnp.issubdtype(out.aval.dtype, jnp.floating)
        if k in others or not is_move(graph.eqns[k]) or not floating:
            break
        found.append(k)
        v = out
    return found, v


def constant(aval, value, dtype):
    """An array of one value that varies between devices as `aval`."""
    return _compat.typed_as(jnp.full(aval.shape, value, dtype), aval)


def neutral(combine: str, aval):
    """What parts are combined with at first: an array like `aval`, of a wide type.

    Args:
      combine: the operation of `lax` that combines the parts.
      aval: shape, type and sharding of what they are combined to.
    """
    dtype = wide(aval.dtype)
    return constant(aval, _NEUTRAL[combine](dtype), dtype)


def _lowest(dtype):
    if dtype == jnp.bool_:
        return False
    floating = jnp.issubdtype(dtype, jnp.floating)
    return -jnp.inf if floating else jnp.iinfo(dtype).min


def _highest(dtype):
    if dtype == jnp.bool_:
        return True
    floating = jnp.issubdtype(dtype, jnp.floating)
    return jnp.inf if floating else jnp.iinfo(dtype).max


def is_arithmetic(combine: str) -> bool:
    """Whether what combines parts works on numbers, and not on their bits."""
    return combine in _NEUTRAL and not combine.startswith("bitwise")


_NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "add": lambda dtype: 0,
    "mul": lambda dtype: 1,
    "max": _lowest,
    "min": _highest,
    "bitwise_or": lambda dtype: 0,
    "bitwise_xor": lambda dtype: 0,
    "bitwise_and": lambda dtype: dtype == jnp.bool_ or -1,
}


def _product(eqn, args: Sequence[Any], params: dict[str, Any], dtype):
    """A product whose result has the type of the sum, whatever its operands have."""
    params = params | {"preferred_element_type": jnp.dtype(dtype), "out_sharding": None}
    direct = lambda *xs: _compat.bind(eqn, list(xs), params)[0]
    if all(x.dtype == dtype for x in args):
        return direct(*args)
    # XLA's CPU backend has not every product of narrow operands that is wide.
    cast = lambda *xs: direct(*(x.astype(dtype) for x in xs))
    either = functools.partial(lax.platform_dependent, cpu=cast, default=direct)
    return _compat.in_context_of(eqn, either, *args)


def term(eqn, args: Sequence[Any], tail: Sequence[Any], dtype):
    """What an equation gives of a part, in the type of the sum that it is added to.

    `tail`: what is done to the sum behind it; all but casts is done to each part.
    """
    params = dict(eqn.params)
    if primitives.is_dot(eqn):
        part = _product(eqn, args, params, dtype)
    else:
        is_product = primitives.is_product(eqn)
        if is_product:
            params["preferred_element_type"] = None
        if is_product or primitives.is_reduce_sum(eqn):
            args = [x.astype(dtype) for x in args]
        (part,) = _compat.bind(eqn, list(args), params)
    for step in filter(turns, tail):
        (part,) = _compat.bind(step, [part])
    return part
