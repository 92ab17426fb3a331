"""Which part of each argument a device has, by the shardings of a call."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from jaxmem.memory.buffers.device_groups import Labels, labels_of


def shards_of_specs(specs: Iterable[Any]) -> tuple[tuple[Labels, ...] | None, ...]:
    """Of each axis of `jax.ShapeDtypeStruct`s, as `shards_of` tells it of a text.

    Devices have the numbers of their places in the mesh of the first that has one.
    """
    specs = tuple(specs)
    meshes = (getattr(spec.sharding, "mesh", None) for spec in specs)
    mesh = next((mesh for mesh in meshes if mesh is not None), None)
    if mesh is None:
        return (None,) * len(specs)
    devices = list(getattr(mesh, "devices", np.empty(0)).flat)
    return tuple(_of_spec(spec, devices) for spec in specs)


def _of_spec(spec: Any, devices: list) -> tuple[Labels, ...] | None:
    if spec.sharding is None:  # whole on all devices, if the compiler has no choice
        return (labels_of([0] * len(devices)),) * len(spec.shape)
    if not isinstance(spec.sharding, NamedSharding) or not devices:
        return None
    try:
        indices = spec.sharding.devices_indices_map(spec.shape)
    except ValueError:  # parts of different sizes
        return None
    if set(indices) != set(devices):
        return None
    places = [[(cut.start, cut.stop) for cut in indices[d]] for d in devices]
    return tuple(labels_of(axis) for axis in zip(*places, strict=True))
