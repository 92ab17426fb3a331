"""Types of arrays: the mesh, the axes that they vary over, and their memory."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.core

from jaxmem._compat.jaxprs import Var


def varying_axes(*xs: Any) -> frozenset[str]:
    """Mesh axes of a `shard_map` over which any of the arrays or types varies."""
    types = (x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x) for x in xs)
    return frozenset().union(*(t.manual_axis_type.varying for t in types))


def without_mesh(v):
    """A new variable of its type, which names no mesh; `v` where it is no array."""
    aval: Any = v.aval
    if not isinstance(aval, jax.core.ShapedArray):
        return v
    how = {"weak_type": aval.weak_type}
    return Var(jax.core.ShapedArray(aval.shape, aval.dtype, **how))


def vary(x: Any, axes: Iterable[str]) -> Any:
    """`x`, typed to vary over all those mesh axes of a `shard_map`; no data moves."""
    missing = tuple(frozenset(axes) - varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def typed_as(x: Any, aval: Any) -> Any:
    """`x`, typed to vary over the mesh axes over which `aval` does."""
    return vary(x, aval.manual_axis_type.varying)


def empty_like(aval) -> Any:
    """An array of this type, in its memory, of values that nobody has written."""
    from jax._src.lax.lax import empty2

    one = empty2(aval.dtype, memory_space=aval.memory_space)
    return typed_as(jax.lax.broadcast(one, aval.shape), aval)
