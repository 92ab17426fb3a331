"""Exported programs with other rules, and with other results of their calls."""

import dataclasses
from typing import Any

import jax

from jaxmem._compat.absent_devices import without_devices


def export(jitted: Any, platform: str, checks: list, rules: list, args: list) -> Any:
    """`jax.export.export` for a platform, with other rules of lowering.

    `checks` are those that are disabled; `rules` are (primitive, rule).
    """
    how = {"disabled_checks": checks, "_override_lowering_rules": tuple(rules)}
    with without_devices():
        exported = jax.export.export(jitted, platforms=[platform], **how)(*args)
    # On a mesh of explicit axes and Auto ones JAX has here what it cannot serialize.
    outs: Any = exported._out_named_shardings
    told = tuple(None if _is_open(sharding) else sharding for sharding in outs)
    return dataclasses.replace(exported, **{"_out_named_shardings": told})


def _is_open(sharding) -> bool:
    """Whether a sharding leaves an axis of its array to XLA."""
    free = jax.sharding.PartitionSpec.UNCONSTRAINED
    return sharding is not None and any(names is free for names in sharding.spec)


def with_results_of_calls(exported: Any, sizes: Any) -> Any:
    """An exported step whose custom calls have other last results.

    `sizes` is a function of a call's name and the shapes of its results to the bytes of
    the last one, or None to leave it.
    """
    from jax._src import xla_bridge
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    def visit(op):
        if op.name == "stablehlo.custom_call":
            call = ir.StringAttr(op.attributes["call_target_name"]).value
            shapes = [tuple(ir.RankedTensorType(r.type).shape) for r in op.results]
            size = sizes(call, shapes)
            if size is not None:
                byte = ir.IntegerType.get_unsigned(8)
                op.results[-1].set_type(ir.RankedTensorType.get((size,), byte))
        return ir.WalkResult.ADVANCE

    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(exported.mlir_module())
        module.operation.walk(visit)
        version = stablehlo.get_version_from_compatibility_requirement(
            stablehlo.StablehloCompatibilityRequirement.WEEK_4
        )
        sdy = xla_bridge.get_backend().serialize_with_sdy
        data = _jax.mlir.serialize_portable_artifact(module, version, sdy)
    return dataclasses.replace(exported, mlir_module_serialized=data)
