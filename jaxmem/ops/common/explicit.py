"""Gathers on meshes of explicit axes: JAX has to be told how results are sharded."""

from itertools import chain
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec


def _names(entry: Any) -> tuple[str, ...]:
    """Of one axis of an array."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def sharding_of_taken(x: Array, index: Array, axis: int) -> NamedSharding | None:
    """Of `x` at places along an axis: as the index is sharded, and the other axes of x.

    None where neither is sharded in its type. What both are sharded over, the index
    has.
    """
    own, places = jax.typeof(x).sharding, jax.typeof(index).sharding
    if not any(own.spec) and not any(places.spec):
        return None
    taken = set(chain.from_iterable(map(_names, places.spec)))
    kept = [None if taken & {*_names(entry)} else entry for entry in own.spec]
    spec = PartitionSpec(*kept[:axis], *places.spec, *kept[axis + 1 :])
    return NamedSharding(own.mesh if any(own.spec) else places.mesh, spec)


def whole(x: Array) -> Array:
    """The array, on each device all of it, if its type says that it is sharded."""
    if not any(jax.typeof(x).sharding.spec):
        return x
    return jax.sharding.reshard(x, PartitionSpec(*(None,) * x.ndim))
