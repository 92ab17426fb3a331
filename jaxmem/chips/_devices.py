"""Devices that are not there: meshes to shard over, topologies to compile for."""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxmem import _compat
from jaxmem._checks import check_names, check_numbers, shown, wrong_type
from jaxmem.chips._table import CHIPS, Gpu, Tpu
from jaxmem.chips._target import Target, get_target
from pallas_kernels import lowering

_GPUS_PER_HOST = 8
_TPUS_PER_HOST = 4


@dataclass(frozen=True, repr=False)
class AbstractGpu(AbstractDevice):
    """A GPU that tells its compute capability, such as "8.0", as real ones do.

    Without it Mosaic compiles kernels for 9.0, whatever the chip.
    """

    compute_capability: str


def target_mesh(
    target: str | Target,
    shape: Sequence[int],
    axis_names: Sequence[str],
    *,
    axis_types: Sequence[AxisType] | None = None,
) -> AbstractMesh:
    """A mesh of absent chips, to build shardings from.

    Put `NamedSharding(mesh, spec)` on the `jax.ShapeDtypeStruct` that go to
    `jaxmem.estimate`; the step is then compiled for that many chips, with its
    collectives, and every figure is bytes on one device.

    Args:
      target: a name of `jaxmem.targets()`.
      shape: devices along each axis; at most 512 in all for a TPU.
      axis_names: one name for each axis.
      axis_types: as in `jax.make_mesh`; all `AxisType.Auto` by default.

    Returns:
      A `jax.sharding.AbstractMesh`, which no plugin has to be started for.

    Raises:
      TypeError: `axis_types` are not one AxisType for each axis.
      ValueError: unknown target, no shape of devices that there are, or shape and names
        of different lengths.

    Example::

      mesh = jaxmem.target_mesh("h100", (8,), ("data",))
      sharding = jax.sharding.NamedSharding(mesh, P("data"))
      weights = jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=sharding)
    """
    chip = get_target(target, check=False)
    sizes = check_numbers("shape", shape, "devices along each axis, ints of at least 1")
    names = check_names("axis_names", axis_names)
    if not sizes or min(sizes) < 1 or len(set(names)) != len(sizes):
        raise ValueError(
            f"target_mesh: shape={shown(shape)} and axis_names={shown(axis_names)}: at "
            "least one device along each axis, and a name of its own for each"
        )
    types = (AxisType.Auto,) * len(sizes) if axis_types is None else axis_types
    is_sequence = isinstance(types, tuple | list) and len(types) == len(sizes)
    if not is_sequence or not all(isinstance(t, AxisType) for t in types):
        allowed = f"{len(sizes)} of jax.sharding.AxisType, one for each axis"
        raise wrong_type("axis_types", axis_types, allowed)
    try:
        topology(chip.name, math.prod(sizes))
    except ValueError as error:
        raise ValueError(f"target_mesh: shape={shown(shape)}: {error}") from None
    return _mesh(chip, sizes, names, tuple(types))


def chip_mesh(target: Target) -> AbstractMesh:
    """A mesh of one absent chip, for kernels that ask which chip it is."""
    return _mesh(target, (1,), ("_",), (AxisType.Auto,))


def lowered_for(target: Target) -> contextlib.AbstractContextManager:
    """A context in which kernels are told this chip, whatever meshes a step names."""
    return lowering.lowered_for(chip_mesh(target).abstract_device)


def kernel_of(eqn: Any, chip: str, sharded: bool) -> Any:
    """The jaxpr of the kernel that an equation is lowered to; None where XLA does it.

    Args:
      eqn: one that may be lowered to a kernel.
      chip: that it is lowered for, a name of `jaxmem.targets()`.
      sharded: whether a `jit` over several devices is lowered.
    """
    return lowering.kernel_of(eqn, _device_of(chip), sharded)


@functools.cache  # for each equation of a step
def _device_of(chip: str) -> Any:
    return chip_mesh(get_target(chip, check=False)).abstract_device


@contextlib.contextmanager
def traced_for(chip: Target | None) -> Iterator[None]:
    """A context in which a step is traced for a chip that may be absent."""
    if chip is None:
        yield
        return
    compiler = CHIPS[chip.name].compiler
    told = compiler.capability if isinstance(compiler, Gpu) else None
    with _compat.absent_gpu(told), _compat.traced_for_tpu(isinstance(compiler, Tpu)):
        yield


def _mesh(chip: Target, sizes, names, types: tuple[AxisType, ...]) -> AbstractMesh:
    compiler, device = CHIPS[chip.name].compiler, None
    if isinstance(compiler, Gpu):
        told = ".".join(map(str, compiler.capability))
        device = AbstractGpu(chip.device, compiler.cores, chip.platform, told)
    elif isinstance(compiler, Tpu):
        device = AbstractDevice(chip.device, compiler.cores, chip.platform)
    return AbstractMesh(sizes, names, types, abstract_device=device)


def topology(name: str, devices: int) -> dict[str, Any]:
    """What the compiling process needs to make `devices` devices of a chip."""
    compiler = CHIPS[name].compiler
    request = {"platform": compiler.platform, "name": name, "devices": devices}
    if isinstance(compiler, Gpu):
        hosts, left = divmod(devices, _GPUS_PER_HOST)
        if hosts and left:
            raise ValueError(f"{devices} GPUs: more than 8 must be a multiple of 8")
        shape = f"1x{hosts}x{_GPUS_PER_HOST}" if hosts else f"1x1x{devices}"
        return request | {"topology": shape, "config": config_text(name)}
    if isinstance(compiler, Tpu):
        shape = _smallest_slice(compiler, devices)
        options = dict(compiler.options) | _host_bounds(shape)
        return request | {"topology": f"{compiler.name}:{shape}", "options": options}
    return request


def _host_bounds(shape: str) -> dict[str, Any]:
    """The chips of one host, where a slice has fewer than the usual 2 x 2."""
    sizes = [int(size) for size in shape.split("x")]
    if math.prod(sizes) >= _TPUS_PER_HOST:
        return {}
    # libtpu takes the usual number otherwise, and older ones refuse the slice
    return {"chips_per_host_bounds": [*sizes, 1][:3]}


def _smallest_slice(tpu: Tpu, devices: int) -> str:
    for shape in tpu.slices:
        if math.prod(map(int, shape.split("x"))) >= devices:
            return shape
    raise ValueError(f"{devices} chips: jaxmem knows no {tpu.name} slice that large")


def config_text(name: str) -> str:
    """XLA's `GpuTargetConfigProto` of a GPU, in text form."""
    chip = CHIPS[name]
    gpu = chip.compiler
    assert isinstance(gpu, Gpu)
    lines = "".join(f"  {key}: {value}\n" for key, value in _device_info(gpu))
    major, minor = gpu.capability
    capability = f"major: {major}" + (f" minor: {minor}" if minor else "")
    return (
        f"gpu_device_info {{\n{lines}  device_memory_size: {chip.memory_bytes}\n"
        f"  cuda_compute_capability {{ {capability} }}\n}}\n"
        "runtime_version { major: 13 minor: 0 patch: 0 }\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 10 }\n"
        f'device_description_str: "{gpu.device}"\n'
    )


def _device_info(gpu: Gpu) -> Iterator[tuple[str, Any]]:
    """The fields of `gpu_device_info`."""
    # these are the same on all GPUs since Volta
    yield "threads_per_block_limit", 1024
    yield "threads_per_warp", 32
    yield "block_dim_limit_x", 2**31 - 1
    yield "block_dim_limit_y", 65535
    yield "block_dim_limit_z", 65535
    yield "registers_per_core_limit", 65536
    yield "registers_per_block_limit", 65536
    yield "shared_memory_per_block", 49152
    # these differ
    yield "shared_memory_per_block_optin", gpu.shared_per_block
    yield "shared_memory_per_core", gpu.shared_per_core
    yield "threads_per_core_limit", gpu.threads_per_core
    yield "core_count", gpu.cores
    yield "fpus_per_core", gpu.fpus_per_core
    yield "memory_bandwidth", gpu.bandwidth
    yield "l2_cache_size", gpu.l2_bytes
    yield "clock_rate_ghz", gpu.clock_ghz
