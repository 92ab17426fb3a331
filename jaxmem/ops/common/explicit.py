"""Gathers on meshes of explicit axes: JAX has to be told how results are sharded."""

from itertools import chain

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem.ir.shards import names_of


def is_sharded(*arrays: Array) -> bool:
    """Whether the type of one of them says so."""
    return any(any(jax.typeof(x).sharding.spec) for x in arrays)


def sharding_of_taken(x: Array, index: Array, axis: int) -> NamedSharding | None:
    """Of `x` at places along an axis: as the index is sharded, and the other axes of x.

    None where neither is sharded in its type. What both are sharded over, the index
    has.
    """
    if not is_sharded(x, index):
        return None
    own, places = jax.typeof(x).sharding, jax.typeof(index).sharding
    taken = set(chain.from_iterable(map(names_of, places.spec)))
    kept = [None if taken & {*names_of(entry)} else entry for entry in own.spec]
    spec = PartitionSpec(*kept[:axis], *places.spec, *kept[axis + 1 :])
    return NamedSharding(own.mesh if is_sharded(x) else places.mesh, spec)


def whole(x: Array) -> Array:
    """The array, on each device all of it, if its type says that it is sharded."""
    if not is_sharded(x):
        return x
    return jax.sharding.reshard(x, PartitionSpec(*(None,) * x.ndim))
