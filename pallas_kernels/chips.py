"""Which chips a kernel is for, and how much memory its blocks may take there.

A kernel that is lowered for another chip aborts the compiler, or fails with an internal
error. So kernels state what they need, and the chip that a program is lowered for is
checked first. A chip of which nothing is known passes.
"""

import re
from typing import Any, NamedTuple

from pallas_kernels._compat import COMPILES_FOR_AMPERE, device_in_context

Capability = tuple[int, int]
MIB = 2**20

# Compute capabilities, for devices that do not tell theirs:
# https://developer.nvidia.com/cuda-gpus
GPUS: dict[str, Capability] = {
    "v100": (7, 0), "t4": (7, 5), "a100": (8, 0), "a10": (8, 6), "l4": (8, 9),
    "l40s": (8, 9), "h100": (9, 0), "h200": (9, 0), "gh200": (9, 0),
    "b200": (10, 0), "gb200": (10, 0),
}  # fmt: skip

# MiB of a core's memory that blocks lie in, as `pltpu.get_tpu_info` has them.
TPUS = {"v2": 16, "v3": 16, "v4": 16, "v5e": 128, "v5p": 64, "v6e": 128, "7x": 64}
_OF_DEVICES = {"v5 lite": "v5e", "v5": "v5p", "v6 lite": "v6e"}

AMPERE, HOPPER = (8, 0), (9, 0)
MULTIPROCESSORS = 132  # of an H100 and an H200
# Its matrix products use instructions that only Hopper has.
_HOPPER_ALONE = ("attention",)


def chip_name(device: Any) -> str | None:
    """A name of `GPUS` or `TPUS`, None where the device is none of these."""
    kind = device.device_kind.lower()
    if device.platform == "tpu":
        name = kind.removeprefix("tpu").strip()
        name = _OF_DEVICES.get(name, name)
        return name if name in TPUS else None
    return next((word for word in re.split(r"[^a-z0-9]+", kind) if word in GPUS), None)


def platform_of(chip: str) -> str:
    """ "tpu" or "cuda", of a name of `TPUS` or `GPUS`."""
    return "tpu" if chip in TPUS else "cuda"


def capability(device: Any) -> Capability | None:
    """The compute capability of a GPU, if it is known."""
    told = getattr(device, "compute_capability", None)
    if told is None:
        return GPUS.get(chip_name(device) or "")
    major, _, minor = str(told).partition(".")
    return (int(major), int(minor or 0))


def vmem_bytes(device: Any) -> int | None:
    """The memory of a TPU's core that blocks lie in, if it is known."""
    name = chip_name(device)
    return None if name is None else TPUS[name] * MIB


def vmem_in_context() -> int | None:
    """`vmem_bytes` of the TPU that is traced for, if one is known."""
    device = device_in_context("tpu")
    return None if device is None else vmem_bytes(device)


def multiprocessors_in_context() -> int:
    """Of the GPU that is traced for; an H100's where none is known."""
    device = device_in_context("cuda")
    names = "core_count", "num_cores"  # of a device, and of a mesh's
    told = [getattr(device, name, None) for name in names]
    return next((count for count in told if count), MULTIPROCESSORS)


class Needs(NamedTuple):
    """What a kernel asks of the chip that it is lowered for.

    Attributes:
      kernel: its name, as messages have it.
      platform: "cuda" or "tpu".
      least, most: compute capabilities of a GPU, both included; None: any.
      vmem: bytes of a TPU core's memory that its blocks take.
    """

    kernel: str
    platform: str
    least: Capability | None = None
    most: Capability | None = None
    vmem: int = 0

    def check(self, device: Any) -> None:
        """Raises ValueError if the kernel is known not to be for this device."""
        if message := self.lacking(device):
            raise ValueError(message)

    def lacking(self, device: Any) -> str:
        """The message of `check`; empty if it passes."""
        if device is None:
            return ""
        on_tpu = self.platform == "tpu"
        needed, has = (self._on_tpu if on_tpu else self._on_gpu)(device)
        return has and (
            f"{self.kernel}: the pallas kernel needs {needed}, this is {has} "
            f"({device.device_kind}); {self._instead(device)}"
        )

    def _on_gpu(self, device: Any) -> tuple[str, str]:
        """What is needed, and what the device has instead, or nothing."""
        has = capability(device)
        least, where = self._least_of(device)
        later = "" if self.most == least else " or later"
        needed = f"compute capability {_dotted(least)}{later}{where}"
        if has is None or least <= has <= (self.most or has):
            return needed, ""
        return needed, _dotted(has)

    def _least_of(self, device: Any) -> tuple[Capability, str]:
        """The least capability on such a device, and when it would be another one."""
        least = self.least or (0, 0)
        if self.least is None or least >= HOPPER:
            return least, ""
        if not COMPILES_FOR_AMPERE:
            return HOPPER, f" ({_dotted(least)} from jax 0.12 on)"
        if getattr(device, "compute_capability", None) is None:
            # Mosaic compiles for 9.0 then, whatever the device's name
            return HOPPER, f" ({_dotted(least)} if the device tells its own)"
        return least, ""

    def _instead(self, device: Any) -> str:
        """What to do on a device that the kernel is not for."""
        if self.kernel == "bits":
            return "XLA's packing has the same layout"
        has, instead = capability(device), "use implementation='xla'"
        if self.kernel != "attention" or has is None or has < AMPERE:
            return instead
        return f"{instead}, or without dropout 'cudnn' or 'tokamax'"

    def _on_tpu(self, device: Any) -> tuple[str, str]:
        size = vmem_bytes(device)
        needed = f"a chip of at least {self.vmem / MIB:.1f} MiB of VMEM a core"
        if size is None or size >= self.vmem:
            return needed, ""
        return needed, f"one of {size // MIB} MiB"


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))


def needs(kernel: str, platform: str) -> Needs:
    """What the kernel of this name asks of a platform's chips, whatever its shapes."""
    if platform == "tpu":
        return Needs(kernel, platform)
    if kernel in _HOPPER_ALONE:
        return Needs(kernel, platform, HOPPER, HOPPER)
    return Needs(kernel, platform, AMPERE)
