"""Chips that are not there, to lower for."""

from jax.sharding import AbstractDevice, AbstractMesh, AxisType


def chip_mesh(kind, size=1):
    """A mesh of that many devices whose `device_kind` is `kind`."""
    platform = "tpu" if kind.startswith("TPU") else "cuda"
    device = AbstractDevice(kind, 1, platform)
    return AbstractMesh((size,), ("x",), (AxisType.Auto,), abstract_device=device)
