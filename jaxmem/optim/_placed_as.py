"""The sharding that an array of an optimizer's state has from its parameter."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxmem.ir.flatten import full_spec


def placed_as(
    path: str, leaf: Any, named: Sequence[tuple[str, Any]]
) -> NamedSharding | None:
    """The sharding of the parameter that an array belongs to, as far as it fits.

    Args:
      path: of the array, which contains its parameter's.
      leaf: the array.
      named: (path, parameter) of all parameters.

    Returns:
      The parameter's sharding along the axes that the array has in common with it; the
      last one may also count its groups of codes. None where no parameter with a
      `NamedSharding` has as many axes.
    """
    within = f"/{path}/"
    for name, p in named:
        sharding = getattr(p, "sharding", None)
        if not isinstance(sharding, NamedSharding) or p.ndim != leaf.ndim:
            continue
        if f"/{name}/" in within:
            sizes = sharding.mesh.shape
            spec = full_spec(sharding, p.ndim)
            axes = range(p.ndim)
            kept = [
                spec[a] if _fits(spec[a], leaf, p, a, sizes) else None for a in axes
            ]
            return sharding.update(spec=jax.sharding.PartitionSpec(*kept))
    return None


def _fits(names: Any, leaf, p, axis: int, sizes) -> bool:
    size, whole = leaf.shape[axis], p.shape[axis]
    groups = axis == p.ndim - 1 and size and whole % size == 0
    listed = names if isinstance(names, tuple) else (names,)
    parts = math.prod(sizes[name] for name in listed if name is not None)
    return bool(size == whole or groups) and size % parts == 0
