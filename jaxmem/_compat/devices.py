"""Devices of this process."""

from typing import Any

import jax


def runs_here(device: Any) -> bool:
    """Whether a device is one of this process, and not of a topology or a mesh."""
    return any(device is own for own in jax.local_devices())


def cudnn_version() -> int | None:
    """The cuDNN of this process, as 91002; None without one."""
    from jax._src.lib import cuda_versions

    return None if cuda_versions is None else cuda_versions.cudnn_get_version()
