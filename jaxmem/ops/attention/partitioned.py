"""A kernel of attention under a `jit` over several devices, as XLA partitions it.

Each device has examples and heads of its own. Positions lie whole on each: arrays that
are sharded along them are gathered for the kernel, and scattered again.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

# The axes of each array: examples b, queries t, keys s, heads n, heads of keys m.
_AXES = {name: "btnh" for name in ("q", "o", "g")}
_AXES |= {"k": "bsmh", "v": "bsmh", "total": "bnt", "kv_len": "b"}
_WHOLE = ("t", "s", "h")  # axes that no device has a part of


def in_parts(run: Callable[[dict], Any], results: Sequence[str]) -> Callable:
    """`run` of a dict of arrays, each device doing its own examples and heads.

    Args:
      run: gives a tuple, or a dict, of arrays.
      results: for each of its leaves an array with the same axes.
    """

    def parts(arrays: dict):
        names = [name for name in sorted(arrays) if arrays[name] is not None]
        call = custom_partitioning(run)
        call.def_partition(
            functools.partial(_partition, run, results),
            **_rule(names, results, arrays["q"].shape[2], arrays["k"].shape[2]),
        )
        return call(arrays)

    return parts


def _rule(
    names: Sequence[str], results: Sequence[str], heads: int, of_keys: int
) -> dict[str, Any]:
    """How shardings of one array follow from those of others, as Shardy has it."""
    whole, sizes = set(_WHOLE), {}
    if heads == of_keys:
        written = {"m": "n"}
    elif of_keys > 1:
        written, sizes = {"n": "(m g)"}, {"g": heads // of_keys}
    else:  # the gradient of the one head of keys is a sum over all heads
        written, whole = {}, whole | {"n", "m"}
    axes = lambda name: [written.get(axis, axis) for axis in _AXES[name]]
    sides = (", ".join(" ".join(axes(x)) for x in side) for side in (names, results))
    # in the order in which the rule first names them
    seen = dict.fromkeys(axis for name in (*names, *results) for axis in axes(name))
    return {
        "sharding_rule": " -> ".join(sides),
        "need_replication_factors": tuple(filter(whole.__contains__, seen)),
        **sizes,
    }


def _partition(run, results, mesh, given, made):
    """What each device does, and how its arrays are sharded: as the queries are."""
    (arrays,) = given
    q, k = arrays["q"], arrays["k"]
    spec = (*q.sharding.spec, *[None] * q.ndim)
    axes = {
        "b": _dividing(mesh, spec[0], q.shape[0]),
        "n": _dividing(mesh, spec[2], k.shape[2]),
    }
    axes["m"] = axes["n"]

    def sharding(name: str) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*map(axes.get, _AXES[name])))

    own = {name: None if x is None else sharding(name) for name, x in arrays.items()}
    outs = jax.tree.structure(made).unflatten(map(sharding, results))
    return mesh, run, outs, (own,)


def _dividing(mesh, axes: Any, size: int) -> Any:
    """Axes of a mesh, if they divide an axis of this size; else None."""
    named = axes if isinstance(axes, tuple) else (axes,) if axes else ()
    return axes if size % math.prod(mesh.shape[a] for a in named) == 0 else None
