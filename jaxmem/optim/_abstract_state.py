"""Shapes of an optimizer's state, with the memory that each array lies in."""

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxmem._checks import wrong_type
from jaxmem.optim.accumulation.steps import as_transformation

_ON_HOST = NamedSharding(
    AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,)),
    PartitionSpec(),
    memory_kind="pinned_host",
)


def abstract_state(tx: Any, params: PyTree) -> Any:
    """What `tx.init(params)` would be, as shapes; nothing is allocated.

    `jax.eval_shape(tx.init, params)` does not tell which arrays lie in the host's
    memory. `jaxmem.estimate` and `.plan(...)` take these shapes as they are.

    Args:
      tx: an optax transformation.
      params: arrays or `jax.ShapeDtypeStruct`s, of one device.

    Returns:
      The state with a `jax.ShapeDtypeStruct` for each array; those in the host's memory
      have a sharding that says so.

    Raises:
      TypeError: `tx` is no transformation, or its state is not made of arrays.
    """
    closed, out = _traced(as_transformation("tx", tx), params)
    leaves, tree = jax.tree.flatten(out)
    return tree.unflatten(map(_with_memory, leaves, closed.out_avals))


def _with_memory(shape, aval) -> jax.ShapeDtypeStruct:
    on_host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
    return shape.update(sharding=_ON_HOST) if on_host else shape


def _traced(tx, params: PyTree) -> tuple[Any, Any]:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    closed, out = jax.make_jaxpr(tx.init, return_shape=True)(shapes)
    if len(jax.tree.leaves(out)) != len(closed.out_avals):
        raise wrong_type("tx", tx, "a transformation whose state is made of arrays")
    return closed, out
