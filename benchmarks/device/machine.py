"""The device of this process: its names, and what its kernels run on."""

import contextlib
import json
import shutil
import subprocess
import sys
from typing import Any

import jax

from jaxmem.chips import CHIPS
from pallas_kernels import simulated
from pallas_kernels.chips import chip_name


def describe() -> dict[str, Any]:
    """Chip, driver and version of jax, and the chip's bytes where it tells them."""
    device = jax.devices()[0]
    return {
        "chip": chip(device),
        "driver": _driver(device),
        "jax": jax.__version__,
        "platform": device.platform,
        "device": device.device_kind,
        "memory": (device.memory_stats() or {}).get("bytes_limit") and _whole(device),
    }


def chip(device: Any = None) -> str:
    """A name of `pallas_kernels.chips`, or the device's own where it has none."""
    device = device or jax.devices()[0]
    return chip_name(device) or device.device_kind


def target() -> str:
    """The device as a name of `jaxmem.targets()`."""
    device = jax.devices()[0]
    return f"tpu-{chip(device)}" if device.platform == "tpu" else chip(device)


def rates() -> Any:
    """The chip's rates; None where none are known."""
    chip = CHIPS.get(target())
    return chip and chip.machine


def asked() -> dict[str, Any]:
    """`describe` by a process of its own: this one leaves the device alone."""
    command = [sys.executable, "-m", "benchmarks.device", "--machine"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if found.returncode:
        raise SystemExit(f"no device is found:\n{found.stderr[-2000:]}")
    return json.loads(found.stdout.splitlines()[-1])


@contextlib.contextmanager
def kernels_here():
    """A context in which kernels run: on the device, or simulated on a CPU."""
    on_cpu = jax.devices()[0].platform == "cpu"
    with simulated("cuda") if on_cpu else contextlib.nullcontext():
        yield


def _driver(device: Any) -> str:
    if device.platform == "gpu":
        found = _smi("driver_version")
        return found or "unknown"
    version = str(getattr(device.client, "platform_version", "unknown"))
    return "none" if device.platform == "cpu" else version.split("\n")[0][:40]


def _whole(device: Any) -> int:
    """Bytes of the chip; its allocator has a share of them alone."""
    found = _smi("memory.total") if device.platform == "gpu" else ""
    return int(float(found) * 2**20) if found else device.memory_stats()["bytes_limit"]


def _smi(what: str) -> str:
    """What the GPU's own program says of the first one; "" without it."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.splitlines()[0].strip() if found.returncode == 0 else ""
