"""Everything that needs `jax.extend` or `jax._src`.

It is the device that a program is lowered for; an operation that raises an error when
it is lowered; MLIR; references under `vmap`; and simulated chips.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import jax
from jax._src import config, xla_bridge
from jax._src.pallas.mpmd import _mpmd_map
from jax.core import ShapedArray
from jax.extend.backend import get_default_device
from jax.extend.core import Primitive as Primitive
from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun
from jax.interpreters import batching, mlir

# Before that, Mosaic GPU aborts the process for compute capabilities below 9.0.
COMPILES_FOR_AMPERE = jax.__version_info__ >= (0, 12)

# The names that a platform has in `jax.Device` and in lowering rules.
_PLATFORMS = {"cuda": ("cuda", "gpu"), "tpu": ("tpu",)}


_ABSENT: ContextVar[Any] = ContextVar("absent", default=None)


@contextlib.contextmanager
def lowered_for(device: Any) -> Iterator[None]:
    """A context that lowers a step for a device that is not there.

    Args:
      device: whichever the meshes are of that the step itself names.
    """
    token = _ABSENT.set(device)
    try:
        yield
    finally:
        _ABSENT.reset(token)


def device_in_context(platform: str) -> Any:
    """The device that is traced or lowered for, if it is of this platform; or None."""
    # It is the device of the mesh in context, which `shard_map` sets, and code that
    # lowers for an absent chip; otherwise the first of this process, as in Mosaic.
    absent = _ABSENT.get()
    if absent is not None:
        return absent if is_of(absent, platform) else None
    device = jax.sharding.get_abstract_mesh().abstract_device
    here = get_default_device() if xla_bridge.backends_are_initialized() else None
    alike = device is not None and device.device_kind == getattr(
        here, "device_kind", None
    )
    if alike or not is_of(device, platform):
        device = here  # which tells more of itself than that of a mesh
    return device if is_of(device, platform) else None


def is_of(device: Any, platform: str) -> bool:
    """Whether it is a device of a platform, as `KernelCandidate` names it."""
    return device is not None and device.platform in _PLATFORMS[platform]


def on_one_device(lowering: Any) -> bool:
    """Whether a lowering rule is for one device, or for one device's shard."""
    axes = lowering.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    if mesh is not None:  # in a `shard_map`, perhaps over some of the axes alone
        left = [n for name, n in mesh.shape.items() if name not in axes.manual_axes]
        return math.prod(left) == 1
    return getattr(axes, "num_devices", 1) == 1


def sharded_over(lowering: Any, mesh: Any) -> Any:
    """A rule's context for JAX's `custom_partitioning`; None if not for a sharded jit.

    JAX tells such a rule neither its mesh nor its devices where an operation does not
    ask for them, which would keep it from being lowered for devices that are not there.

    Args:
      lowering: the context of a lowering rule.
      mesh: of the operands, as their types name it.
    """
    module = lowering.module_context
    axes = module.axis_context
    # a `shard_map` over some axes of a mesh alone names its mesh
    count = 1 if hasattr(axes, "mesh") else getattr(axes, "num_devices", 1)
    of_mesh = not mesh.empty and mesh.size == count and not mesh.are_all_axes_manual
    if count == 1 or not of_mesh or not config.use_shardy_partitioner.value:
        return None
    # They only stand for the places of the mesh: each device gets the same program.
    devices = tuple(itertools.islice(itertools.cycle(jax.devices()), count))
    axes = dataclasses.replace(axes, device_assignment=devices, abstract_mesh=mesh)
    return lowering.replace(module_context=module.replace(axis_context=axes))


@functools.cache
def mlir_parts() -> Any:
    """MLIR's `ir` and its dialects `arith`, `llvm` and `vector`, by these names.

    They are imported when a kernel that needs them is lowered.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, vector

    return SimpleNamespace(ir=ir, arith=arith, llvm=llvm, vector=vector)


_refused = Primitive("refused")
_refused.multiple_results = True


def refused(args: Any, like: Any, message: str) -> Any:
    """Arrays like `like`, made of `args`; raises ValueError when it is lowered."""
    leaves, tree = jax.tree.flatten(like)
    kinds = tuple((x.shape, x.dtype) for x in leaves)
    outs = _refused.bind(*jax.tree.leaves(args), kinds=kinds, message=message)
    outs = [varying_as(x, leaf) for x, leaf in zip(outs, leaves, strict=True)]
    return jax.tree.unflatten(tree, outs)


def varying_as(x: Any, *likes: Any) -> Any:
    """`x`, typed to vary over a `shard_map`'s axes as each of `likes` does."""
    axes = frozenset().union(*map(_varying, likes)) - _varying(jax.typeof(x))
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def _varying(like: Any) -> frozenset:
    return like.manual_axis_type.varying if like.manual_axis_type else frozenset()


@_refused.def_abstract_eval
def _abstract(*avals, kinds, message):
    return [ShapedArray(shape, dtype) for shape, dtype in kinds]


def _raise(*args, message, **params):
    raise ValueError(message)


_refused.def_impl(_raise)
mlir.register_lowering(_refused, lambda ctx, *args, **params: _raise(**params))


def _batched(args, dims, *, kinds, message):
    sizes = [x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None]
    kinds = tuple(((sizes[0], *shape), dtype) for shape, dtype in kinds)
    return _refused.bind(*args, kinds=kinds, message=message), [0] * len(kinds)


batching.primitive_batchers[_refused] = _batched


_traced_late = Primitive("traced_late")
_traced_late.multiple_results = True


def traced_late(
    run: Callable[..., tuple], under_vmap: Callable[..., tuple], *args: Any
) -> tuple:
    """`run(*args)`, whose references no transformation sees.

    `jax.custom_batching.custom_vmap` cannot hold references, and in jax 0.10 `vmap`
    does not support GPU kernels that have them. So `run` is traced when it is lowered.
    Only simulated kernels, which have effects of their own, are traced at once.

    Args:
      run: function of arrays to a tuple of arrays.
      under_vmap: replaces it under `vmap`, for arrays with an additional leading axis.
      *args: arrays.
    """
    if simulated_platform() == "cuda":
        return tuple(run(*args))
    plain = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    avals = tuple(jax.make_jaxpr(run)(*plain).out_avals)
    outs = _traced_late.bind(*args, run=run, under_vmap=under_vmap, avals=avals)
    return tuple(varying_as(x, *map(jax.typeof, args)) for x in outs)


_traced_late.def_abstract_eval(lambda *args, run, under_vmap, avals: avals)
_traced_late.def_impl(lambda *args, run, under_vmap, avals: jax.jit(run)(*args))


def lower_plainly(run: Callable[..., tuple], ctx, *args):
    """Lowers `run` of `args`, typed as arrays that do not vary over a mesh."""
    # References must not vary, and a program traced for such arrays has no casts.
    plain, outs = (
        [ShapedArray(x.shape, x.dtype) for x in avals]
        for avals in (ctx.avals_in, ctx.avals_out)
    )
    ctx = ctx.replace(avals_in=plain, avals_out=outs)
    # nor need what others' kernels give be declared to vary
    with config._check_vma(False):
        return mlir.lower_fun(run, multiple_results=True)(ctx, *args)


mlir.register_lowering(
    _traced_late,
    lambda ctx, *args, run, under_vmap, avals: lower_plainly(run, ctx, *args),
)


def _late_under_vmap(args, dims, *, run, under_vmap, avals):
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    rows = [batching.bdim_at_front(x, d, size) for x, d in zip(args, dims, strict=True)]
    outs = under_vmap(*rows)
    return outs, [0] * len(outs)


batching.primitive_batchers[_traced_late] = _late_under_vmap


def aliased_kernel(
    body: Callable, *, out_type: Any, mesh: Any, aliases: dict[int, int], **options: Any
) -> Callable:
    """`pl.kernel`; `aliases` has the output that takes the place of an input."""
    # The public way is to pass references, and jax 0.10 names all such kernels alike.
    simulator = config.pallas_tpu_interpret_mode_context_manager.value
    options |= {"input_output_aliases": aliases, "interpret": simulator or False}
    return _mpmd_map([(mesh, body)], out_type, **options)


_SIMULATED: ContextVar[str | None] = ContextVar("simulated", default=None)


def simulated_platform() -> str | None:
    """The platform that is simulated here, or None."""
    return _SIMULATED.get()


def can_take_turns() -> bool:
    """Whether programs of a GPU can wait for each other here."""
    # No simulator has semaphores. That of jax 0.10 runs programs in order; later ones
    # take what one program reads of another for a race.
    return simulated_platform() is None or jax.__version_info__ < (0, 11)


def aliases(pairs: dict[int, int], *, ragged: bool) -> dict[int, int]:
    """`input_output_aliases`; none where the simulator does not support them."""
    # Its aliased outputs would contain the padding of blocks that extend past an edge.
    return {} if ragged and simulated_platform() == "tpu" else pairs


def with_layout(x: Any, layout: Any) -> Any:
    """`plgpu.layout_cast`; nothing in a simulation, which jax 0.10 cannot cast in."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return x if simulated_platform() == "cuda" else plgpu.layout_cast(x, layout)


@contextlib.contextmanager
def simulated(platform: str) -> Iterator[None]:
    """A context in which `dispatch` runs the kernels of "tpu" or "cuda" on a CPU."""
    # Memory that was not written holds NaN, and races are detected.
    make: Any
    force: Any
    if platform == "tpu":
        from jax.experimental.pallas import tpu as pltpu

        make, force = pltpu.InterpretParams, pltpu.force_tpu_interpret_mode
        reset = pltpu.reset_tpu_interpret_mode_state
    else:  # public from jax 0.11 on
        from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call, params

        make, force = params.InterpretGPUParams, params.force_gpu_interpret_mode
        reset = interpret_pallas_call.reset_gpu_interpret_mode_state
    token = _SIMULATED.set(platform)
    try:
        with force(make(detect_races=True, uninitialized_memory="nan")):
            yield
    finally:
        _SIMULATED.reset(token)
        reset()
