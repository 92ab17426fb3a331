"""Custom partitioning, without calls back into Python."""

import dataclasses
import itertools
from typing import Any

import jax
from jax.extend import core as jex_core

from jaxmem._compat.platforms import is_on_one_device
from jaxmem._compat.shardings import Axes, propagate, result_axes

_PARTITIONED = b"CustomSPMDPartitioning"  # XLA's name of such a call
# the number of a call, and of one of its operands, on operations of a module
_CALL, _OPERAND = "jaxmem.call", "jaxmem.operand"


def counted_partitions(mesh: Any = None) -> list[tuple[Any, Any]]:
    """Rules for an export in which `partitions_in` finds calls that XLA partitions.

    `mesh`: that of the program's arguments, for calls whose operands name none.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    numbers = itertools.count()

    def counted(plain, ctx, *values, **params):
        number = next(numbers)
        # propagation writes on results how they are sharded, and not on operands
        operands = [stablehlo.OptimizationBarrierOp([x]) for x in values]
        for i, operand in enumerate(operands):
            operand.attributes[_OPERAND] = ir.StringAttr.get(f"{number} {i}")
        outs = plain(ctx, *(operand.results[0] for operand in operands), **params)
        # what would be called back, which no exported program may keep
        ctx.module_context.keepalives.pop()
        outs[0].owner.attributes[_CALL] = ir.StringAttr.get(str(number))
        return outs

    return _rules(counted, mesh)


def partitioned_by(partitions: list, mesh: Any = None) -> list[tuple[Any, Any]]:
    """Rules for an export in which those calls are `shard_map`s of their parts.

    `mesh`: as for `counted_partitions`.
    """
    from jax._src.interpreters import mlir

    left = iter(partitions)

    def in_parts(plain, ctx, *values, **params):
        over, avals = ctx.module_context.axis_context.abstract_mesh, ctx.avals_out
        run = _in_parts(over, next(left), (ctx.avals_in, avals), params)
        return mlir.lower_fun(run, multiple_results=True)(ctx, *values)

    return _rules(in_parts, mesh)


def _rules(partitioned, mesh: Any) -> list[tuple[Any, Any]]:
    """Rules that lower a call of `custom_partitioning` on several devices otherwise.

    `partitioned` is a rule, with JAX's own as its first argument.
    """
    from jax._src import custom_partitioning as partitioning
    from jax._src.interpreters import mlir

    def rule(ctx, *values, **params):
        if is_on_one_device(ctx):
            whole = jex_core.jaxpr_as_fun(params["call"])
            return mlir.lower_fun(whole, multiple_results=True)(ctx, *values)
        ctx = _with_mesh(ctx, mesh)
        axes = ctx.module_context.axis_context
        if getattr(axes, "device_assignment", None) is None:
            raise ValueError(
                "custom_partitioning on several devices needs arrays that name the "
                "mesh, by jax.sharding.NamedSharding, and no jax.shard_map over some "
                "of its axes, to be compiled for absent chips"
            )
        return partitioned(
            partitioning._custom_partitioning_lowering_rule, ctx, *values, **params
        )

    return [(partitioning.custom_partitioning_p, rule)]


def _with_mesh(ctx, given: Any):
    """A rule's context that names the mesh, as the types of its operands do.

    `given`: a mesh for operands of which none does, as beside a `jax.shard_map` under
    `jax.checkpoint`.
    """
    # What stands for devices only counts: no operation is done on them.
    module = ctx.module_context
    axes, meshes = module.axis_context, [x.sharding.mesh for x in ctx.avals_in]
    given = getattr(given, "abstract_mesh", given)
    mesh = next((mesh for mesh in meshes if not mesh.empty), given)
    if mesh is None or hasattr(axes, "mesh") or mesh.size != axes.num_devices:
        return ctx
    devices = tuple(itertools.islice(itertools.cycle(jax.devices()), mesh.size))
    axes = dataclasses.replace(axes, device_assignment=devices, abstract_mesh=mesh)
    return ctx.replace(module_context=module.replace(axis_context=axes))


def partitions_in(exported: Any) -> list[tuple[list[Axes], list[Axes]]]:
    """How (operands, results) of each call of `counted_partitions` are sharded."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    if _PARTITIONED not in exported.mlir_module_serialized:
        return []
    operands: dict[str, dict[str, Axes]] = {}  # of each call
    results: dict[str, list[Axes]] = {}

    def visit(op):
        if _OPERAND in op.attributes:
            call, i = ir.StringAttr(op.attributes[_OPERAND]).value.split()
            operands.setdefault(call, {}).setdefault(i, *result_axes(op))
        if _CALL in op.attributes:
            call = ir.StringAttr(op.attributes[_CALL]).value
            results.setdefault(call, result_axes(op))
        return ir.WalkResult.ADVANCE

    with mlir.make_ir_context(), ir.Location.unknown():
        module: Any = ir.Module.parse(exported.mlir_module())
        propagate(module)
        module.operation.walk(visit)
    both = ((operands[call], results[call]) for call in sorted(results, key=int))
    return [([x[i] for i in sorted(x, key=int)], made) for x, made in both]


def _in_parts(mesh, partition, avals, params):
    """A function of flat arrays that does one call by its own rule of partitioning.

    `partition` and `avals` are pairs: of operands, and of results.
    """
    trees = params["in_tree"], params["out_tree"]

    def sharded(aval, axes):
        spec = jax.sharding.PartitionSpec(*(names or None for names in axes))
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)

    sides = zip(trees, avals, partition, strict=True)
    types = [tree.unflatten(list(map(sharded, *side))) for tree, *side in sides]
    _, part, made, given = params["partition"](*params["static_args"], mesh, *types)
    specs = [
        # a rule may name more axes than there are: cuDNN's does
        tuple(
            jax.sharding.PartitionSpec(*sharding.spec[: aval.ndim])
            for sharding, aval in zip(tree.flatten_up_to(asked), side, strict=True)
        )
        for tree, asked, side in zip(trees, (given, made), avals, strict=True)
    ]

    def flat(*arrays):
        return tuple(jax.tree.leaves(part(*trees[0].unflatten(arrays))))

    how: dict[str, Any] = {"mesh": mesh, "check_vma": False}
    return jax.shard_map(flat, in_specs=specs[0], out_specs=specs[1], **how)
