"""The only file that touches `jax._src` or `jax.extend`.

Everything here is private to JAX and may move; `tests/test_compat.py` calls each
function, so that a new JAX fails there, loudly, and not in a user's step.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import pathlib
from contextvars import ContextVar
from typing import Any

import jax
import jax.core
from jax.extend import core as jex_core

ClosedJaxpr = jex_core.ClosedJaxpr
Jaxpr = jex_core.Jaxpr
JaxprEqn = jex_core.JaxprEqn
Literal = jex_core.Literal
Primitive = jex_core.Primitive
Var = jex_core.Var

# The name scope that `jax.checkpoint`, and all of this package, recompute under.
RECOMPUTED = "rematted_computation"

_HERE = pathlib.Path(__file__).parent
# The folders of this package, and of the kernels that come with it.
OWN = tuple(f"{path}{os.sep}" for path in (_HERE, _HERE.parent / "pallas_kernels"))
# Its steps are a user's.
_DEMO = f"{_HERE / 'demo'}{os.sep}"
# What these write into a user's step, who called them has not written.
_REWRITERS = tuple(f"{_HERE / name}{os.sep}" for name in ("memory", "scheduling"))


def saved_residuals(fn, *args: Any, **kwargs: Any) -> list[tuple[Any, str]]:
    """(aval, source text) of each value that the backward pass of `fn` keeps."""
    from jax._src.ad_checkpoint import saved_residuals as impl

    return impl(fn, *args, **kwargs)


def compile_module(module: str, devices: list, options: dict[str, Any]) -> Any:
    """The executable of a StableHLO module, for devices that need not be there.

    `jax.jit` asks the devices for their memories, which those of a topology do not have
    on every platform: the module itself names the memory of each argument.
    """
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jaxlib.mlir import ir

    places = np.array([[device.id for device in devices]])
    how = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=places,
        env_options_overrides=options,
    )
    listed = xla_client.DeviceList(tuple(devices))
    client = devices[0].client
    build = client.compile_and_load if client.platform == "cpu" else client.compile
    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        return build(parsed, executable_devices=listed, compile_options=how)


def varying_axes(*xs: Any) -> frozenset[str]:
    """Mesh axes of a `shard_map` over which any of the arrays varies."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in xs))


def without_mesh(v):
    """A new variable of its type, which names no mesh; `v` where it is no array."""
    aval: Any = v.aval
    if not isinstance(aval, jax.core.ShapedArray):
        return v
    how = {"weak_type": aval.weak_type}
    return Var(jax.core.ShapedArray(aval.shape, aval.dtype, **how))


def typed_as(x, aval):
    """`x`, the same on all devices, typed to vary and be sharded as `aval`."""
    # `x` may have more axes, in front: they are not sharded.
    axes = tuple(aval.manual_axis_type.varying)
    x = jax.lax.pcast(x, axes, to="varying") if axes else x
    spec = aval.sharding.spec
    if all(names is None for names in spec):
        return x
    spec = jax.sharding.PartitionSpec(*[None] * (x.ndim - aval.ndim), *spec)
    return jax.sharding.reshard(x, jax.NamedSharding(aval.sharding.mesh, spec))


def empty_like(aval) -> Any:
    """An array of this type, in its memory, of values that nobody has written."""
    from jax._src.lax.lax import empty2

    one = empty2(aval.dtype, memory_space=aval.memory_space)
    return typed_as(jax.lax.broadcast(one, aval.shape), aval)


def bind(eqn, args, params=None) -> list[Any]:
    """Outputs of `eqn` on `args`, under its own source line and name scopes."""
    params = eqn.primitive.get_bind_params(eqn.params if params is None else params)
    outs = in_context_of(eqn, functools.partial(eqn.primitive.bind, **params), *args)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def in_context_of(eqn, fn, *args):
    """`fn(*args)` under the source line and the name scopes of `eqn`."""
    from jax._src.source_info_util import current_name_stack, user_context

    info = eqn.source_info
    stack = current_name_stack() + info.name_stack
    with user_context(info.traceback, name_stack=stack), eqn.ctx.manager:
        return fn(*args)


def in_mesh_in_context(jaxpr):
    """A jaxpr whose equations, traced in no mesh, are in the one that is in context.

    An equation is lowered in the mesh that it was traced in.
    """
    from jax._src.core import JaxprEqnContext

    mesh = jax.sharding.get_abstract_mesh()

    def within(value):
        if isinstance(value, (tuple, list)):
            return type(value)(map(within, value))
        if isinstance(value, ClosedJaxpr):
            return value.replace(jaxpr=in_mesh_in_context(value.jaxpr))
        return in_mesh_in_context(value) if isinstance(value, Jaxpr) else value

    def moved(eqn):
        context = eqn.ctx
        if context.cur_abstract_mesh.empty:
            with context.manager, jax.sharding.use_abstract_mesh(mesh):
                context = JaxprEqnContext()
        params = {k: within(v) if _has_jaxpr(v) else v for k, v in eqn.params.items()}
        return eqn.replace(ctx=context, params=params)

    return jaxpr.replace(eqns=list(map(moved, jaxpr.eqns)))


def _has_jaxpr(value) -> bool:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(x, (Jaxpr, ClosedJaxpr)) for x in values)


def no_leak_check():
    """A context in which `jax.checking_leaks()` has no effect.

    It takes a cycle of references in code of ours for a tracer that has escaped.
    """
    from jax._src.config import check_tracer_leaks

    return check_tracer_leaks(False)


def source_line(eqn) -> str:
    """Where `eqn` was written outside of this package, as `file:line (function)`."""
    return caller_line(eqn)


def is_own_file(name: str) -> bool:
    """Whether a file is part of this package, and its lines are no user's."""
    return name.startswith(OWN) and not name.startswith(_DEMO)


# Parts of the names of files that are nobody's own.
INSTALLED = ("/site-packages/", "/dist-packages/", "<frozen ")


def caller_line(eqn, *libraries: str) -> str:
    """The innermost line outside of this package that led to `eqn`, or ""."""
    # `libraries` are parts of the names of other files to look past.
    from jax._src.source_info_util import user_frames

    for frame in user_frames(eqn.source_info.traceback):
        file = frame.file_name
        if file.startswith(_REWRITERS):
            return ""
        if not is_own_file(file) and not any(part in file for part in libraries):
            return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
    return ""


def is_own_line(eqn) -> bool:
    """Whether a file of this package wrote `eqn`: its innermost line lies in one."""
    from jax._src.source_info_util import user_frames

    innermost = next(iter(user_frames(eqn.source_info.traceback)), None)
    return innermost is not None and innermost.file_name.startswith(OWN)


def operation(eqn) -> tuple[str, dict[str, Any]]:
    """The name and the parameters of an equation, or of what it has been made of.

    jax 0.12 traces some functions as one operation, of which it makes others late.
    """
    whole = eqn.params.get("_prim")
    if eqn.primitive.name != "call_hi_primitive" or whole is None:
        return eqn.primitive.name, eqn.params
    return type(whole).__name__, whole.params


def name_stack(eqn) -> str:
    """The name scopes (module path) of `eqn`."""
    return str(eqn.source_info.name_stack)


def constants_first(closed):
    """A jaxpr without constants of its own: they become the first arguments."""
    from jax._src.interpreters import partial_eval

    if not hasattr(closed.jaxpr, "consts"):
        return partial_eval.convert_constvars_jaxpr(closed.jaxpr)
    n = len(closed.consts)
    avals = [v.aval for v in [*closed.jaxpr.constvars, *closed.jaxpr.invars]]

    def run(*args):
        return jax.core.eval_jaxpr(closed.jaxpr, args[:n], *args[n:])

    return jax.make_jaxpr(run)(*avals)


def shard_map_again(eqn, body, args) -> list[Any]:
    """The `shard_map` of `eqn` with another body, a function of a list of shards."""
    names = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes"))
    mapped = jax.shard_map(
        lambda *shards: tuple(body(shards)),
        mesh=eqn.params["mesh"],
        in_specs=tuple(eqn.params["in_specs"]),
        out_specs=tuple(eqn.params["out_specs"]),
        axis_names=names,
        check_vma=eqn.params["check_vma"],
    )
    return list(in_context_of(eqn, mapped, *args))


def function_source(jaxpr) -> str:
    """Name and place of the function that a jaxpr was traced from."""
    return str(jaxpr.debug_info.func_src_info)


def scan_counts(eqn) -> tuple[int, int]:
    """(constants, carries) among the inputs of a `scan` equation; the rest are xs."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def without_dead_code(closed):
    """The jaxpr without equations that nobody needs; its inputs stay as they are."""
    from jax.interpreters import partial_eval

    jaxpr, consts = getattr(closed, "jaxpr", closed), closed.consts
    used = [True] * len(jaxpr.outvars)
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, used, instantiate=True)
    return ClosedJaxpr(jaxpr, consts)


def is_unspecified(sharding) -> bool:
    """Whether a `jit` equation leaves a sharding to the compiler."""
    from jax._src.sharding_impls import UnspecifiedValue

    return isinstance(sharding, UnspecifiedValue)


def has_side_effects(eqn) -> bool:
    """Whether an equation does more than compute; naming a mesh axis is no effect."""
    from jax._src.core import NamedAxisEffect

    return any(not isinstance(e, NamedAxisEffect) for e in eqn.effects)


def jit_info(fn) -> Any:
    """What `jax.jit` was told: `donate_argnums`, `static_argnames`, ...; or None."""
    # Positions and names are both complete: jax finds one by the other.
    return getattr(fn, "_jit_info", None)


def names_shardings(info) -> bool:
    """Whether `jit_info` has a sharding of an argument or a result."""
    leaves = (*info.in_shardings_leaves, *info.out_shardings_leaves)
    return any(isinstance(s, jax.sharding.Sharding) for s in leaves)


class JobStore:
    """What the processes of a distributed job share, by name."""

    def __init__(self):
        from jax._src.distributed import global_state

        self._client: Any = global_state.client

    def set(self, name: str, value: bytes) -> None:
        """Stores a value, over what was there."""
        self._client.key_value_set_bytes(name, value, allow_overwrite=True)

    def wait(self, name: str, seconds: float) -> bytes | None:
        """The value of a name; None where nobody stores one for so long."""
        try:
            return self._client.blocking_key_value_get_bytes(name, int(1e3 * seconds))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    def under(self, folder: str) -> dict[str, bytes]:
        """All values whose names start with `folder`."""
        return dict(self._client.key_value_dir_get_bytes(folder))


def trace_state() -> Any:
    """What tells, by `==`, whether two moments belong to one trace."""
    return jex_core.get_opaque_trace_state()


def policy_names(policy) -> tuple[frozenset[str], frozenset[str]]:
    """The `checkpoint_name`s that one of jax's own policies (saves, offloads)."""
    # jax 0.11 has objects for some of the functions of 0.10 and 0.12
    inside = {**getattr(policy, "__dict__", {}), **_closure(policy)}
    saved = getattr(policy, "saveable_names", frozenset())
    saved = saved.union(inside.get("names_which_can_be_saved", ()))
    moved = frozenset(inside.get("names_which_can_be_offloaded", ()))
    for key in ("policy_1", "policy_2"):
        if key in inside:
            both = policy_names(inside[key])
            saved, moved = saved | both[0], moved | both[1]
    return saved, moved


def forgets_its_names(policy) -> bool:
    """Whether it is a `save_anything_except_these_names` that does not look at them."""
    maker = jax.checkpoint_policies.save_anything_except_these_names.__name__
    name = getattr(policy, "__qualname__", "").split(".")[0]
    return name == maker and not _closure(policy)


def _closure(fn) -> dict[str, Any]:
    """The names that a function closes over, and what they are."""
    cells = getattr(fn, "__closure__", None) or ()
    names = fn.__code__.co_freevars if cells else ()
    return {n: cell.cell_contents for n, cell in zip(names, cells, strict=True)}


def is_on_one_device(ctx) -> bool:
    """Whether a primitive is lowered for one device, or for one device's shard."""
    axes = ctx.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    if mesh is not None:  # in a `shard_map`, perhaps over some of the axes alone
        left = [n for name, n in mesh.shape.items() if name not in axes.manual_axes]
        return math.prod(left) == 1
    return getattr(axes, "num_devices", 1) == 1


def is_for_export(ctx) -> bool:
    """Whether `jax.export` lowers a primitive, for whichever version loads it."""
    return ctx.module_context.lowering_parameters.for_export


def is_threefry(aval) -> bool:
    """Whether keys of this type are those of JAX's default generator."""
    from jax.extend import random

    return aval.dtype._impl is random.threefry_prng_impl


def is_partitionable(eqn) -> bool:
    """Whether `eqn` was traced with `jax_threefry_partitionable`."""
    return eqn.ctx.threefry_partitionable


def threefry2x32(key1, key2, high, low) -> list[Any]:
    """Two random words of each counter, whose words are `high` and `low`."""
    from jax.extend import random

    return random.threefry2x32_p.bind(key1, key2, high, low)


def uses_shardy() -> bool:
    """Whether XLA partitions by Shardy, which is the default."""
    config: Any = jax.config
    return bool(config.jax_use_shardy_partitioner)


_Axes = tuple[tuple[str, ...], ...]  # of the mesh, for each axis of an array


def propagated(fn, args) -> list[_Axes]:
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
    rules: Any = tuple(counted_partitions())
    how: Any = mlir.LoweringParameters(override_lowering_rules=rules)
    with _without_devices():
        lowered = traced.lower(lowering_platforms=("tpu",), _private_parameters=how)
    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        _propagate(module)
        functions = {
            ir.StringAttr(op.operation.attributes["sym_name"]).value: op.operation
            for op in module.body.operations
        }
        results = map(ir.DictAttr, functions["main"].attributes["res_attrs"])
        named = ((one, "sdy.sharding" in one) for one in results)
        return [_axes_of(one["sdy.sharding"]) if said else () for one, said in named]


def _propagate(module: Any) -> None:
    """Has Shardy propagate what a StableHLO module says of shardings."""
    from jaxlib.mlir import passmanager

    pipeline = "builtin.module(sdy-propagation-pipeline)"
    passmanager.PassManager.parse(pipeline).run(module.operation)


def _axes_of(sharding) -> _Axes:
    """Whole axes of the mesh along each axis of an array."""
    from jaxlib.mlir.dialects import sdy

    def names(dimension) -> tuple[str, ...]:
        axes = map(sdy.AxisRefAttr, sdy.DimensionShardingAttr(dimension).axes)
        return tuple(axis.name for axis in axes if axis.sub_axis_info is None)

    return tuple(map(names, sdy.TensorShardingAttr(sharding).dimension_shardings))


def _result_axes(op) -> list[_Axes]:
    """The same of each result of an operation."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    if "sdy.sharding" in op.attributes:
        of_each = sdy.TensorShardingPerValueAttr(op.attributes["sdy.sharding"])
        return [_axes_of(one) for one in of_each.shardings]
    return [((),) * ir.RankedTensorType(r.type).rank for r in op.results]


# -- custom partitioning, without calls back into Python


def export(jitted: Any, platform: str, checks: list, rules: list, args: list) -> Any:
    """`jax.export.export` for a platform, with other rules of lowering.

    `checks` are those that are disabled; `rules` are (primitive, rule).
    """
    how = {"disabled_checks": checks, "_override_lowering_rules": tuple(rules)}
    with _without_devices():
        return jax.export.export(jitted, platforms=[platform], **how)(*args)


def _without_devices():
    """A context in which what `counted_partitions` lowers asks for no devices."""
    return _set(_NO_DEVICES, True)


_PARTITIONED = b"CustomSPMDPartitioning"  # XLA's name of such a call
# the number of a call, and of one of its operands, on operations of a module
_CALL, _OPERAND = "jaxmem.call", "jaxmem.operand"


def counted_partitions() -> list[tuple[Any, Any]]:
    """Rules for an export in which `partitions_in` finds calls that XLA partitions."""
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

    return _rules(counted)


def partitioned_by(partitions: list) -> list[tuple[Any, Any]]:
    """Rules for an export in which those calls are `shard_map`s of their parts."""
    from jax._src.interpreters import mlir

    left = iter(partitions)

    def in_parts(plain, ctx, *values, **params):
        mesh, avals = ctx.module_context.axis_context.abstract_mesh, ctx.avals_out
        run = _in_parts(mesh, next(left), (ctx.avals_in, avals), params)
        return mlir.lower_fun(run, multiple_results=True)(ctx, *values)

    return _rules(in_parts)


def _rules(partitioned) -> list[tuple[Any, Any]]:
    """Rules that lower a call of `custom_partitioning` on several devices otherwise.

    `partitioned` is a rule, with JAX's own as its first argument.
    """
    from jax._src import custom_partitioning as partitioning
    from jax._src.interpreters import mlir

    def rule(ctx, *values, **params):
        if is_on_one_device(ctx):
            whole = jex_core.jaxpr_as_fun(params["call"])
            return mlir.lower_fun(whole, multiple_results=True)(ctx, *values)
        ctx = _with_mesh(ctx)
        axes = ctx.module_context.axis_context
        if getattr(axes, "device_assignment", None) is None:
            raise ValueError(
                "custom_partitioning on several devices needs arrays that name the "
                "mesh, by jax.sharding.NamedSharding, and no jax.shard_map over some "
                "of its axes, to be compiled for chips that are not there"
            )
        return partitioned(
            partitioning._custom_partitioning_lowering_rule, ctx, *values, **params
        )

    return [(partitioning.custom_partitioning_p, rule)]


def _with_mesh(ctx):
    """A rule's context that names the mesh, as the types of its operands do."""
    # What stands for devices only counts: no operation is done on them.
    module = ctx.module_context
    axes, meshes = module.axis_context, [x.sharding.mesh for x in ctx.avals_in]
    mesh = next((mesh for mesh in meshes if not mesh.empty), None)
    if mesh is None or hasattr(axes, "mesh") or mesh.size != axes.num_devices:
        return ctx
    devices = tuple(itertools.islice(itertools.cycle(jax.devices()), mesh.size))
    axes = dataclasses.replace(axes, device_assignment=devices, abstract_mesh=mesh)
    return ctx.replace(module_context=module.replace(axis_context=axes))


def partitions_in(exported: Any) -> list[tuple[list[_Axes], list[_Axes]]]:
    """How (operands, results) of each call of `counted_partitions` are sharded."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    if _PARTITIONED not in exported.mlir_module_serialized:
        return []
    operands: dict[str, dict[str, _Axes]] = {}  # of each call
    results: dict[str, list[_Axes]] = {}

    def visit(op):
        if _OPERAND in op.attributes:
            call, i = ir.StringAttr(op.attributes[_OPERAND]).value.split()
            operands.setdefault(call, {}).setdefault(i, *_result_axes(op))
        if _CALL in op.attributes:
            call = ir.StringAttr(op.attributes[_CALL]).value
            results.setdefault(call, _result_axes(op))
        return ir.WalkResult.ADVANCE

    with mlir.make_ir_context(), ir.Location.unknown():
        module: Any = ir.Module.parse(exported.mlir_module())
        _propagate(module)
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


# -- cuDNN's attention, as JAX lowers it

# Compute capability of the GPU that a step is traced for, where none is here.
_ABSENT_GPU: ContextVar[tuple[int, int] | None] = ContextVar("absent", default=None)
# Whether it is lowered by rules that need no devices.
_NO_DEVICES: ContextVar[bool] = ContextVar("no devices", default=False)
_ABSENT_CUDNN = 91800  # newer than all that JAX's rules ask for


def absent_gpu(capability: tuple[int, int] | None):
    """A context in which JAX's attention by cuDNN can be traced without a GPU.

    JAX asks the process for its GPU and its cuDNN while it traces. None changes
    nothing.
    """
    if capability is not None:
        _answer_for_absent_gpus()
    return _set(_ABSENT_GPU, capability or _ABSENT_GPU.get())


def no_absent_gpu():
    """A context outside of `absent_gpu`, for what is lowered while a step is traced."""
    return _set(_ABSENT_GPU, None)


@contextlib.contextmanager
def _set(variable: ContextVar, value: Any):
    """A context in which a variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@functools.cache
def _answer_for_absent_gpus() -> None:
    from jax._src import dispatch
    from jax._src.cudnn import fused_attention_stablehlo as fused

    def asked(name, answer):
        plain = getattr(fused, name)

        @functools.wraps(plain)
        def run(*args):
            have = _ABSENT_GPU.get()
            return plain(*args) if have is None else answer(have, *args)

        setattr(fused, name, run)

    version = lambda text: tuple(int(x) for x in text.split("."))
    asked("check_cudnn_version", lambda have: _ABSENT_CUDNN)
    asked("check_compute_capability", lambda have, least: have >= version(least))
    asked("is_cuda_compute_capability_equal", lambda have, of: have == version(of))
    # JAX asks for the devices that these are spread over, as it need not where each
    # device has its own, in a `shard_map`.
    kinds = "fwd_p", "fwd_p_wrapper", "bwd_p", "bwd_p_wrapper"
    spread = {getattr(fused, f"_dot_product_attention_{kind}") for kind in kinds}

    class Asking(set):
        def __contains__(self, primitive) -> bool:
            absent = _ABSENT_GPU.get() is not None or _NO_DEVICES.get()
            absent = absent and primitive in spread
            return super().__contains__(primitive) and not absent

    asking = Asking(dispatch.prim_requires_devices_during_lowering)
    dispatch.prim_requires_devices_during_lowering = asking


def cudnn_attention(form: Any, scale: float, arrays: dict) -> tuple:
    """(output [b, t, n, h], logarithm of the sums of exponentials [b, n, t]).

    `form` is one of `ops/attention/cudnn_rules.py`; `arrays` are q, k, v, and lengths
    of keys or None. JAX's own function asks the process for its GPU
    and its cuDNN: these need not be there when a program is compiled.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    operands, how = _fused_call(fused, form, scale, arrays)
    out = fused._dot_product_attention_fwd_p.bind(*operands, is_training=True, **how)
    return tuple(out)


def cudnn_attention_grads(form: Any, scale: float, arrays: dict) -> dict[str, Any]:
    """Gradients of q, k and v; `arrays` has besides the output o, its cotangent g, and
    `total`, the second result of `cudnn_attention`.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    operands, how = _fused_call(fused, form, scale, arrays)
    results = arrays["total"], arrays["o"], arrays["g"]
    grads = fused._dot_product_attention_bwd_p.bind(*operands, *results, **how)
    return dict(zip("qkv", grads, strict=True))


def _fused_call(fused: Any, form: Any, scale: float, arrays: dict) -> tuple:
    """The ten operands that both passes have, and their parameters."""
    import jax.numpy as jnp

    q, k, v = (arrays[name] for name in "qkv")
    none = jnp.zeros(0, q.dtype)
    lengths = [none, none]
    kind = fused.MaskType.CAUSAL if form.causal else fused.MaskType.NO_MASK
    if form.padded:
        kind = fused.MaskType.PADDING
        every = jnp.full(q.shape[0], q.shape[1], jnp.int32)
        lengths = [every, arrays["kv_len"]]
    how: dict[str, Any] = {
        "scale": scale,
        "seed": 42,  # of dropout, which there is none of
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias, and no gradient of one
        "mask_type": kind,
        "layout": fused.AttentionLayout.BTNH.value,
        "sliding_window_length": form.window,
    }
    if jax.__version_info__ >= (0, 12):
        how |= {"score_mod_name": None, "score_mod_jaxpr": None}
    return (q, k, v, none, *lengths, *[none] * 4), how


def splash_attention_grads(kernel: Any, q, k, v, o, total, g) -> tuple:
    """Gradients of q, k and v, [heads, length, size], by a `SplashAttentionKernel`.

    JAX's own backward pass begins with the forward one, of which the results are here.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )

    how = kernel.kwargs
    names = "save_residuals", "mask_value", "is_mqa", "block_sizes"
    more = "residual_checkpoint_name", "mask_function", "attn_logits_soft_cap"
    given = [how[name] for name in (*names, *more, "interpret")]
    infos = kernel.dq_mask_info, kernel.dkv_mask_info
    saved = q, k, v, None, None, o, total, *infos
    run: Any = splash._splash_attention_bwd
    return run(*given, saved, g)[3:6]


def runs_here(device: Any) -> bool:
    """Whether a device is one of this process, and not of a topology or a mesh."""
    return any(device is own for own in jax.local_devices())


def cudnn_version() -> int | None:
    """The cuDNN of this process, as 91002; None without one."""
    from jax._src.lib import cuda_versions

    return None if cuda_versions is None else cuda_versions.cudnn_get_version()


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
