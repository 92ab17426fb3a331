"""The chips that a step can be compiled for, as a plain table of facts.

GPU figures are those of the vendors' data sheets and of XLA's device descriptions; the
memory of a TPU is what its compiler lets a program use. The text that XLA wants for a
GPU is made from the table. One chip's memory differs between variants (an A100 has 40
or 80 GB, a lent one may be shared): give `max_batch(memory=...)` your own figure.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxmem._checks import check_names, check_numbers, shown, wrong_type
from jaxmem.memory._bytes import format_bytes

INSTALL = 'pip install "jaxmem[targets]"'
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class GpuFacts:
    """What XLA's GPU compiler asks about a chip."""

    name: str
    capability: tuple[int, int]
    cores: int
    shared_per_core: int
    shared_per_block: int
    threads_per_core: int
    fpus_per_core: int
    bandwidth: int
    l2_bytes: int
    clock_ghz: float


@dataclasses.dataclass(frozen=True)
class TpuFacts:
    """How libtpu calls a chip, the slices it is lent in, and a device's cores."""

    name: str
    slices: tuple[str, ...]
    cores: int = 1
    options: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Target:
    """A chip that `jaxmem.estimate` can compile for.

    Attributes:
      name: what to pass as `target=`.
      platform: "cpu", "cuda" or "tpu".
      memory_bytes: bytes a program can use on one device; None for cpu.
      device: the vendor's name of the device.
      available: whether this installation can compile for it.
      why_not: what is missing, and the line that installs it; empty if available.
    """

    name: str
    platform: str
    memory_bytes: int | None
    device: str
    available: bool = True
    why_not: str = ""


class Targets(tuple[Target, ...]):
    """The rows of `targets()`; prints as a table."""

    def __str__(self) -> str:
        rows = [f"{'target':<9} {'memory':>10}  {'device':<24} compiles here"]
        for t in self:
            state = "yes" if t.available else f"no: {t.why_not}"
            rows.append(f"{t.name:<9} {_memory_of(t):>10}  {t.device:<24} {state}")
        return "\n".join(rows)

    def __repr__(self) -> str:
        return str(self)

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table("target", "memory", "device", "compiles here")
        for t in self:
            state = "yes" if t.available else t.why_not
            # rich would take the extra's brackets for markup
            cells = (t.name, _memory_of(t), t.device, state)
            table.add_row(*(cell.replace("[", r"\[") for cell in cells))
        return table


def _memory_of(target: Target) -> str:
    return format_bytes(target.memory_bytes) if target.memory_bytes else "-"


_GPUS = {
    "t4": (
        15835660288,
        GpuFacts(
            "Tesla T4", (7, 5), 40, 65536, 65536, 1024, 64, 320064000000, 2**22, 1.59
        ),
    ),
    "l4": (
        23569891328,
        GpuFacts(
            "NVIDIA L4", (8, 9), 58, 102400, 101376, 1536, 128,
            300096000000, 48 * 2**20, 2.04,
        ),
    ),
    "a100": (
        42331013120,
        GpuFacts(
            "NVIDIA A100-SXM4-40GB", (8, 0), 108, 167936, 166912, 2048, 64,
            1555200000000, 40 * 2**20, 1.41,
        ),
    ),
    "h100": (
        84929347584,
        GpuFacts(
            "NVIDIA H100 80GB HBM3", (9, 0), 132, 233472, 232448, 2048, 128,
            3352320000000, 50 * 2**20, 1.98,
        ),
    ),
    "h200": (
        151397597184,
        GpuFacts(
            "NVIDIA H200 141GB HBM3e", (9, 0), 132, 233472, 232448, 2048, 128,
            4800000000000, 50 * 2**20, 1.98,
        ),
    ),
    "b200": (
        191514411008,
        GpuFacts(
            "NVIDIA B200", (10, 0), 148, 233472, 232448, 2048, 128,
            7672320000000, 132644864, 1.965,
        ),
    ),
}  # fmt: skip

_FLAT = "1x1 1x2 2x2 2x4 4x4 4x8 8x8 8x16 16x16".split()
_CUBE = "1x1x1 1x1x2 2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8".split()
_TPUS = {
    "tpu-v4": (
        int(30.75 * _GIB),
        # without it a v4 chip is two devices, which is not how jax lends it
        TpuFacts("v4", tuple(_CUBE), 2, (("chip_config_name", "megacore"),)),
    ),
    "tpu-v5e": (int(15.75 * _GIB), TpuFacts("v5e", tuple(_FLAT))),
    "tpu-v5p": (int(95.73 * _GIB), TpuFacts("v5p", tuple(_CUBE), 2)),
    "tpu-v6e": (int(31.24 * _GIB), TpuFacts("v6e", tuple(_FLAT))),
}

NAMES = ("cpu", *_GPUS, *_TPUS)


def targets() -> Targets:
    """The known chips, their memory, and whether this installation compiles for each.

    Returns:
      One `Target` a chip, in a tuple that prints as a table (also under `rich`). A chip
      that cannot be compiled for says why, with the line that installs what is missing.
    """
    return Targets(_target(name) for name in NAMES)


def get_target(name: "str | Target | None", *, check: bool = True) -> Target:
    """The row of a name; raises where there is none or nothing can compile for it."""
    name = name.name if isinstance(name, Target) else "cpu" if name is None else name
    if not isinstance(name, str) or name not in NAMES:
        raise ValueError(
            f"unknown target {name!r}: jaxmem knows {', '.join(NAMES)} "
            "(see jaxmem.targets())"
        )
    target = _target(name)
    if check and not target.available:
        raise RuntimeError(f"cannot compile for {name!r} here: {target.why_not}")
    return target


def local_target() -> Target:
    """The row of this process's first device; raises where it is none that we know."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return get_target("cpu")
    for target in targets():
        if target.device.lower() == device.device_kind.lower():
            return target
    raise ValueError(
        f"target=None: this process's device is {device.device_kind!r}, which is none "
        f"of {', '.join(NAMES)}: name the one that is meant"
    )


def target_mesh(
    target: "str | Target",
    shape: Sequence[int],
    axis_names: Sequence[str],
    *,
    axis_types: Sequence[AxisType] | None = None,
) -> AbstractMesh:
    """A mesh of chips that are not there, to build shardings from.

    Put `NamedSharding(mesh, spec)` on the `jax.ShapeDtypeStruct` that go to
    `jaxmem.estimate`; the step is then compiled for that many chips, with its
    collectives, and every figure is bytes on one device.

    Args:
      target: a name of `jaxmem.targets()`.
      shape: devices along each axis; at most 512 in all for a TPU.
      axis_names: one name an axis.
      axis_types: as in `jax.make_mesh`; all `AxisType.Auto` by default.

    Returns:
      A `jax.sharding.AbstractMesh`, which no plugin has to be started for.

    Raises:
      TypeError: `axis_types` are no AxisTypes, one for each axis.
      ValueError: unknown target, no shape of devices that there are, or shape and names
        of different lengths.
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
    right = isinstance(types, tuple | list) and len(types) == len(sizes)
    if not right or not all(isinstance(t, AxisType) for t in types):
        allowed = f"{len(sizes)} of jax.sharding.AxisType, one for each axis"
        raise wrong_type("axis_types", axis_types, allowed)
    try:
        topology(chip.name, math.prod(sizes))
    except ValueError as error:
        raise ValueError(f"target_mesh: shape={shown(shape)}: {error}") from None
    device = _abstract_device(chip)
    return AbstractMesh(sizes, names, tuple(types), abstract_device=device)


def chip_mesh(target: Target) -> AbstractMesh:
    """A mesh of one chip that is not there, for kernels that ask which chip it is."""
    device = _abstract_device(target)
    return AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=device)


def _abstract_device(chip: Target) -> AbstractDevice | None:
    if chip.platform == "cpu":
        return None
    cores = (_GPUS | _TPUS)[chip.name][1].cores
    return AbstractDevice(chip.device, cores, chip.platform)


def topology(name: str, devices: int) -> dict[str, Any]:
    """What the worker needs to make `devices` devices of a target; plain data."""
    target = get_target(name, check=False)
    base = {"platform": target.platform, "name": name, "devices": devices}
    if target.platform == "cuda":
        hosts, left = divmod(devices, 8)
        text = f"1x1x{devices}" if hosts == 0 else f"1x{hosts}x8"
        if hosts and left:
            raise ValueError(f"{devices} GPUs: more than 8 must be a multiple of 8")
        return base | {"topology": text, "config": config_text(name)}
    if target.platform == "tpu":
        facts = _TPUS[name][1]
        return base | {
            "topology": f"{facts.name}:{_slice_of(facts, devices)}",
            "options": dict(facts.options),
        }
    return base


def _slice_of(facts: TpuFacts, devices: int) -> str:
    for text in facts.slices:
        if math.prod(map(int, text.split("x"))) >= devices:
            return text
    raise ValueError(f"{devices} chips: jaxmem knows no {facts.name} slice that large")


def config_text(name: str) -> str:
    """XLA's `GpuTargetConfigProto` of a GPU, in text form."""
    memory, facts = _GPUS[name]
    info = dict(_device_info(facts, memory))
    lines = "".join(f"  {key}: {value}\n" for key, value in info.items())
    major, minor = facts.capability
    capability = f"major: {major}" + (f" minor: {minor}" if minor else "")
    return (
        f"gpu_device_info {{\n{lines}"
        f"  cuda_compute_capability {{ {capability} }}\n}}\n"
        "runtime_version { major: 13 minor: 0 patch: 0 }\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 10 }\n"
        f'device_description_str: "{facts.name}"\n'
    )


def _device_info(facts: GpuFacts, memory: int) -> Iterator[tuple[str, Any]]:
    """The fields of `gpu_device_info`; the first rows are the same on all these."""
    yield "threads_per_block_limit", 1024
    yield "threads_per_warp", 32
    yield "block_dim_limit_x", 2**31 - 1
    yield "block_dim_limit_y", 65535
    yield "block_dim_limit_z", 65535
    yield "registers_per_core_limit", 65536
    yield "registers_per_block_limit", 65536
    yield "shared_memory_per_block", 49152
    yield "shared_memory_per_block_optin", facts.shared_per_block
    yield "shared_memory_per_core", facts.shared_per_core
    yield "threads_per_core_limit", facts.threads_per_core
    yield "core_count", facts.cores
    yield "fpus_per_core", facts.fpus_per_core
    yield "memory_bandwidth", facts.bandwidth
    yield "l2_cache_size", facts.l2_bytes
    yield "clock_rate_ghz", facts.clock_ghz
    yield "device_memory_size", memory


def _target(name: str) -> Target:
    if name == "cpu":
        return Target("cpu", "cpu", None, "the host's CPU")
    platform = "cuda" if name in _GPUS else "tpu"
    memory, facts = (_GPUS | _TPUS)[name]
    missing = _missing(platform)
    device = facts.name if platform == "cuda" else f"TPU {facts.name}"
    return Target(name, platform, memory, device, not missing, missing)


@functools.cache
def _missing(platform: str) -> str:
    """Why this installation cannot compile for a platform; empty if it can."""
    if platform == "tpu":
        return "" if version_of("libtpu") else f"libtpu is missing: {INSTALL}"
    known = {"cuda13": "nvidia-cuda-nvcc", "cuda12": "nvidia-cuda-nvcc-cu12"}
    for cuda, nvcc in known.items():
        plugin = version_of(f"jax-{cuda}-pjrt")
        if not plugin or not version_of(f"jax-{cuda}-plugin"):
            continue
        if _release(plugin) != _release(jax.__version__):
            return (
                f"jax-{cuda}-pjrt is {plugin}, jax is {jax.__version__}: they must be "
                f"of one version ({INSTALL})"
            )
        return "" if version_of(nvcc) else f"{nvcc} is missing: {INSTALL}"
    return f"jax's CUDA plugin is missing: {INSTALL}"


def _release(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:3])


def version_of(package: str) -> str | None:
    """The installed version of a distribution, None if there is none."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
