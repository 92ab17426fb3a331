"""What the user's side knows of a step that its compiled module may not say."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from jaxmem import _compat
from jaxmem.memory.buffers.device_groups import Labels, labels_of
from jaxmem.memory.compile.call import FlatCall


@dataclass(frozen=True)
class StepFacts:
    """What is known of the step that a module was compiled from.

    Attributes:
      outputs: the sizes of each array that it returns, over all devices; empty where
        they are not known.
      donated: the numbers of the module's parameters that may be written; None where
        it is not known.
      shards: of each parameter, for each axis which part of it each device has; None
        for one of which it is not known.
      inputs: the sizes of each parameter, over all devices.
      options: the names and values that the compiler was given.
    """

    outputs: tuple[tuple[int, ...], ...] = ()
    donated: frozenset[int] | None = None
    shards: tuple[tuple[Labels, ...] | None, ...] = ()
    inputs: tuple[tuple[int, ...], ...] = ()
    options: str = ""


def facts_of(
    call: FlatCall, used: Sequence[int], outputs: Iterable[Any], options: str = ""
) -> StepFacts:
    """Of a call; `used`: the leaves that are parameters, `outputs`: with shapes."""
    leaves = [call.leaves[n] for n in used]
    return StepFacts(
        tuple(tuple(aval.shape) for aval in outputs),
        frozenset(i for i, leaf in enumerate(leaves) if leaf.donated),
        shards_of_specs(leaf.spec for leaf in leaves),
        tuple(tuple(leaf.spec.shape) for leaf in leaves),
        options,
    )


def shards_of_specs(specs: Iterable[Any]) -> tuple[tuple[Labels, ...] | None, ...]:
    """Of each axis of `jax.ShapeDtypeStruct`s, which part of it each device has.

    Devices have the numbers of their places in the mesh of the first that has one.
    """
    specs = tuple(specs)
    mesh = _compat.mesh_of_specs(specs)
    if mesh is None:
        return (None,) * len(specs)
    return tuple(_shards(spec.sharding, len(spec.shape), mesh) for spec in specs)


def _devices(mesh: Any) -> list:
    """Devices in a mesh's order, or their numbers where it is abstract."""
    abstract = isinstance(mesh, AbstractMesh)
    return list(range(mesh.size)) if abstract else list(mesh.devices.flat)


@lru_cache(maxsize=256)  # most arguments have one of a few
def _shards(sharding: Any, rank: int, first: Any) -> tuple[Labels, ...] | None:
    devices = _devices(first)
    if sharding is None:  # whole on all devices, if the compiler has no choice
        return (labels_of([0] * len(devices)),) * rank
    if not isinstance(sharding, NamedSharding):
        return None
    mesh, split = sharding.mesh, sharding.spec
    places = {device: place for place, device in enumerate(_devices(mesh))}
    if set(places) != set(devices):
        return None
    order = [places[device] for device in devices]
    coordinates = dict(zip(mesh.axis_names, _coordinates(mesh), strict=True))

    def part(names: Any) -> Labels:
        along = (names,) if isinstance(names, str) else tuple(names or ())
        rows = [coordinates[name][order].tolist() for name in along]
        return labels_of(list(zip(*rows, strict=True)) or [0] * len(order))

    return tuple(part(names) for names in (*split, *[None] * (rank - len(split))))


def _coordinates(mesh: Any) -> Any:
    """Along each axis of a mesh, where each of its devices is."""
    return np.indices(mesh.axis_sizes).reshape(len(mesh.axis_sizes), -1)
