"""Shardings of arguments: which are alike, and those of shapes, checked.

jax itself checks those of arrays.
"""

from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.tree_util import keystr


def canonical(sharding: Any) -> Any:
    """A sharding without the `None`s at the end of its spec, which mean nothing.

    XLA gives the results of a step without them, whatever its arguments had: to `jit`
    both are one.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    axes = tuple(sharding.spec)
    n = next((i for i in range(len(axes), 0, -1) if axes[i - 1] is not None), 0)
    if n == len(axes):
        return sharding
    return sharding.update(spec=sharding.spec.update(partitions=axes[:n]))


def check_shardings(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """ValueError for shapes that cannot be spread so, or that are on several meshes."""
    first: tuple[str, NamedSharding] | None = None
    for path, x in jax.tree.leaves_with_path((args, kwargs)):
        where = getattr(x, "sharding", None)
        is_shape = isinstance(x, jax.ShapeDtypeStruct)
        if not is_shape or not isinstance(where, NamedSharding) or where.mesh.size == 1:
            continue
        title = f"argument {_name(path)} of shape {x.shape}"
        try:
            where.shard_shape(x.shape)
        except ValueError as error:
            raise ValueError(
                f"{title} is to be spread by {where.spec} over a mesh of "
                f"{dict(where.mesh.shape)}: each of its axes must be a multiple of "
                "the devices that it is spread over"
            ) from error
        first = first or (title, where)
        if first[1].mesh.size != where.mesh.size:
            raise ValueError(
                f"{first[0]} is on a mesh of {dict(first[1].mesh.shape)} and {title} "
                f"on one of {dict(where.mesh.shape)}: a step has one mesh"
            )


def _name(path) -> str:
    """As `0['w']` or `x['w']`."""
    _, argument, *rest = path
    return f"{getattr(argument, 'idx', getattr(argument, 'key', ''))}{keystr((*rest,))}"
