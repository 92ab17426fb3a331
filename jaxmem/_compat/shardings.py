"""Shardings in a module, and how Shardy propagates them."""

from collections.abc import Iterable
from typing import Any

import jax

Axes = tuple[tuple[str, ...], ...]  # of the mesh, for each axis of an array


def mesh_of_specs(specs: Iterable[Any]) -> Any:
    """The mesh of the first of `jax.ShapeDtypeStruct`s that has one, or None."""
    meshes = (getattr(spec.sharding, "mesh", None) for spec in specs)
    return next((mesh for mesh in meshes if mesh is not None), None)


def is_unspecified(sharding) -> bool:
    """Whether a `jit` equation leaves a sharding to the compiler."""
    from jax._src.sharding_impls import UnspecifiedValue

    return isinstance(sharding, UnspecifiedValue)


def uses_shardy() -> bool:
    """Whether XLA partitions by Shardy, which is the default."""
    config: Any = jax.config
    return bool(config.jax_use_shardy_partitioner)


def propagate(module: Any) -> None:
    """Has Shardy propagate what a StableHLO module says of shardings."""
    from jaxlib.mlir import passmanager

    pipeline = "builtin.module(sdy-propagation-pipeline)"
    passmanager.PassManager.parse(pipeline).run(module.operation)


def axes_of(sharding) -> Axes:
    """Whole axes of the mesh along each axis of an array."""
    from jaxlib.mlir.dialects import sdy

    def names(dimension) -> tuple[str, ...]:
        axes = map(sdy.AxisRefAttr, sdy.DimensionShardingAttr(dimension).axes)
        return tuple(axis.name for axis in axes if axis.sub_axis_info is None)

    return tuple(map(names, sdy.TensorShardingAttr(sharding).dimension_shardings))


def result_axes(op) -> list[Axes]:
    """The same of each result of an operation."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    if "sdy.sharding" in op.attributes:
        of_each = sdy.TensorShardingPerValueAttr(op.attributes["sdy.sharding"])
        return [axes_of(one) for one in of_each.shardings]
    return [((),) * ir.RankedTensorType(r.type).rank for r in op.results]
