"""The chips that jaxmem knows, one row each. To add a chip, add its row here.

Variants of one chip differ in memory (an A100 has 40 or 80 GB, and a shared one has
less): pass `memory=` or `budget=` where the figure below is not yours.
"""

import math
from dataclasses import dataclass
from typing import Any

_GIB = 2**30

# Seconds of a kernel beside what it does, with the gap to the next.
_LAUNCH = 1.5e-6  # `benchmarks.time` on an H200: 1.2 of a kernel, 0.3 to the next one
# XLA's defaults: of a GPU's memory, and `xla_gpu_memory_limit_slop_factor` of that.
_PLANNED = 0.8 * 0.95
_TPU_LAUNCH = 1.2e-6  # XLA's own cycles: small operations (v5e and v6e)


@dataclass(frozen=True)
class Machine:
    """The rates of a chip.

    Attributes:
      narrow: flops per second of matrix products in 16 bits.
      wide: flops per second of matrix products in 32 bits, at jax's default precision.
      bandwidth: bytes per second between the chip and its own memory.
      host: bytes per second between the chip and the memory of its host.
      link: bytes per second that the chip sends to the others of its machine or slice:
        NVLink or PCIe in one direction; of a TPU both links of one axis of its torus.
      launch: seconds of a kernel beside what it does, with the gap to the next.
    """

    narrow: float
    wide: float
    bandwidth: float
    host: float
    link: float
    launch: float = _LAUNCH


@dataclass(frozen=True)
class Gpu:
    """The fields of a GPU that XLA's compiler asks for."""

    device: str
    capability: tuple[int, int]
    cores: int
    shared_per_core: int
    shared_per_block: int
    threads_per_core: int
    fpus_per_core: int
    bandwidth: int  # the exact figure, of which `Machine.bandwidth` has four digits
    l2_bytes: int
    clock_ghz: float
    platform: str = "cuda"


@dataclass(frozen=True)
class Tpu:
    """A TPU as libtpu knows it."""

    name: str  # libtpu's own name
    slices: tuple[str, ...]  # the topologies that libtpu offers, from the smallest
    cores: int = 1  # tensor cores of one device
    options: tuple[tuple[str, Any], ...] = ()  # further options of the topology
    platform: str = "tpu"

    @property
    def device(self) -> str:
        """What jax calls the device."""
        return f"TPU {self.name}"


@dataclass(frozen=True)
class Cpu:
    """The host itself."""

    device: str = "the host's CPU"
    platform: str = "cpu"


@dataclass(frozen=True)
class Chip:
    """What jaxmem knows of a chip."""

    memory_bytes: int | None  # for a program; None where they differ between hosts
    machine: Machine  # how fast it computes and moves bytes
    compiler: Cpu | Gpu | Tpu  # what its compiler has to be told

    @property
    def planned_bytes(self) -> float:
        """The peak above which XLA recomputes operations unasked; inf but for GPUs."""
        if self.memory_bytes is None or not isinstance(self.compiler, Gpu):
            return math.inf
        return _PLANNED * self.memory_bytes


_FLAT = tuple("1x1 1x2 2x2 2x4 4x4 4x8 8x8 8x16 16x16".split())
_CUBE = tuple("1x1x1 1x1x2 2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8".split())

# The figures of GPUs come from the vendors' data sheets and from XLA's own device
# descriptions. The memory of a TPU is what its compiler lets one program use. The rate
# to the host is that of 16 lanes of PCI Express.
CHIPS = {
    "cpu": Chip(None, Machine(2e11, 1e11, 2e10, 2e10, 2e10), Cpu()),
    "t4": Chip(
        15835660288,
        Machine(65e12, 8.1e12, 320e9, 16e9, 16e9),
        Gpu(
            "Tesla T4", (7, 5), 40, 65536, 65536, 1024, 64, 320064000000, 2**22, 1.59
        ),
    ),
    "l4": Chip(
        23569891328,
        Machine(121e12, 60e12, 300e9, 32e9, 32e9),
        Gpu(
            "NVIDIA L4", (8, 9), 58, 102400, 101376, 1536, 128,
            300096000000, 48 * 2**20, 2.04,
        ),
    ),
    "a100": Chip(
        42331013120,
        Machine(312e12, 156e12, 1555e9, 32e9, 300e9),
        Gpu(
            "NVIDIA A100-SXM4-40GB", (8, 0), 108, 167936, 166912, 2048, 64,
            1555200000000, 40 * 2**20, 1.41,
        ),
    ),
    "h100": Chip(
        84929347584,
        Machine(989e12, 494e12, 3352e9, 64e9, 450e9),
        Gpu(
            "NVIDIA H100 80GB HBM3", (9, 0), 132, 233472, 232448, 2048, 128,
            3352320000000, 50 * 2**20, 1.98,
        ),
    ),
    "h200": Chip(
        151397597184,
        Machine(989e12, 494e12, 4800e9, 64e9, 450e9),
        Gpu(
            "NVIDIA H200 141GB HBM3e", (9, 0), 132, 233472, 232448, 2048, 128,
            4800000000000, 50 * 2**20, 1.98,
        ),
    ),
    "b200": Chip(
        191514411008,
        Machine(2250e12, 1100e12, 7672e9, 64e9, 900e9),
        Gpu(
            "NVIDIA B200", (10, 0), 148, 233472, 232448, 2048, 128,
            7672320000000, 132644864, 1.965,
        ),
    ),
    "tpu-v4": Chip(
        int(30.75 * _GIB),
        Machine(275e12, 275e12, 1228e9, 16e9, 90e9, _TPU_LAUNCH),
        # Without "megacore" libtpu makes two devices of a v4 chip; jax lends it as one.
        Tpu("v4", _CUBE, 2, (("chip_config_name", "megacore"),)),
    ),
    "tpu-v5e": Chip(
        int(15.75 * _GIB),
        Machine(197e12, 197e12, 819e9, 16e9, 90e9, _TPU_LAUNCH),
        Tpu("v5e", _FLAT),
    ),
    "tpu-v5p": Chip(
        int(95.73 * _GIB),
        Machine(459e12, 459e12, 2765e9, 32e9, 180e9, _TPU_LAUNCH),
        Tpu("v5p", _CUBE, 2),
    ),
    "tpu-v6e": Chip(
        int(31.24 * _GIB),
        Machine(918e12, 918e12, 1640e9, 32e9, 180e9, _TPU_LAUNCH),
        Tpu("v6e", _FLAT),
    ),
}  # fmt: skip
