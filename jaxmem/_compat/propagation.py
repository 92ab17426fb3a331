"""How the results of a function are sharded, given its arguments."""

from typing import Any

import jax

from jaxmem._compat.absent_devices import without_devices
from jaxmem._compat.partitioning import counted_partitions
from jaxmem._compat.shardings import Axes, axes_of, mesh_of_specs, propagate


def propagated(fn, args) -> list[Axes]:
    """How the results of a function are sharded, as Shardy propagates it.

    Args:
      fn: gives a flat list of arrays.
      args: their types, under shardings of one mesh.

    Returns:
      For each result, for each of its axes: axes of the mesh. Nothing for a result that
      is whole on each device, or along a part of an axis of the mesh.
    """
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    # for a platform whose random numbers are ordinary operations
    traced = jax.jit(fn, keep_unused=True).trace(*args)
    rules: Any = tuple(counted_partitions(mesh_of_specs(args)))
    how: Any = mlir.LoweringParameters(override_lowering_rules=rules)
    with without_devices():
        lowered = traced.lower(lowering_platforms=("tpu",), _private_parameters=how)
    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        propagate(module)
        functions = {
            ir.StringAttr(op.operation.attributes["sym_name"]).value: op.operation
            for op in module.body.operations
        }
        results = map(ir.DictAttr, functions["main"].attributes["res_attrs"])
        named = ((one, "sdy.sharding" in one) for one in results)
        return [axes_of(one["sdy.sharding"]) if said else () for one, said in named]
