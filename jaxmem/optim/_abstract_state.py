"""Shapes of an optimizer's state, with the memory that each array lies in."""

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxmem._checks import wrong_type
from jaxmem._paths import path_of, paths_and_leaves
from jaxmem.optim._placed_as import placed_as
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
      params: arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      The state with a `jax.ShapeDtypeStruct` for each array; those in the host's memory
      have a sharding that says so. Arrays that belong to a sharded parameter have its
      sharding along the axes that they have in common with it.

    Raises:
      TypeError: `tx` is no transformation, or its state is not made of arrays.
    """
    closed, out = _traced(as_transformation("tx", tx), params)
    named = paths_and_leaves(params)
    elsewhere = next(filter(None, (_sharding(x) for _, x in named)), _ON_HOST)
    leaves, tree = jax.tree.flatten_with_path(out)
    return tree.unflatten(
        _placed(path_of(path), shape, aval, named, elsewhere)
        for (path, shape), aval in zip(leaves, closed.out_avals, strict=True)
    )


def _placed(path: str, shape, aval, named, elsewhere) -> jax.ShapeDtypeStruct:
    sharding = placed_as(path, shape, named) if shape.shape else None
    if getattr(aval, "memory_space", None) == jax.memory.Space.Host:
        sharding = (sharding or elsewhere).with_memory_kind("pinned_host")
    return shape if sharding is None else shape.update(sharding=sharding)


def _sharding(x) -> NamedSharding | None:
    """Replication over the devices of a sharded parameter."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec())


def _traced(tx, params: PyTree) -> tuple[Any, Any]:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    closed, out = jax.make_jaxpr(tx.init, return_shape=True)(shapes)
    if len(jax.tree.leaves(out)) != len(closed.out_avals):
        raise wrong_type("tx", tx, "a transformation whose state is made of arrays")
    return closed, out
