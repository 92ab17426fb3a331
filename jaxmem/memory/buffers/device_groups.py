"""Groups of devices, and shards of arrays, as XLA writes them.

A *labelling* has a number for each device; devices with one number have the same value,
or the same part of an array. `None` is one that is not known.
"""

import re
from collections.abc import Hashable, Sequence
from functools import lru_cache

import numpy as np

from jaxmem.memory.buffers.shapes import integers

Labels = tuple[int, ...]

_LISTS = re.compile(r"replica_groups=\{(\{[\d,{} ]*\})?\}")
_TILES = r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
_GROUP_TILES = re.compile(rf"replica_groups={_TILES}")
_MESH = r"mesh\[([^\]]*)\](?:, device_ids=\(([^)]*(?:\([^)]*\))?)\))?"
_GROUP_MESH = re.compile(rf"replica_groups={_MESH},? ?\{{([^}}]*)\}}")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_SIZE = re.compile(r"'([^']+)'=(\d+)")
_SHARDING = re.compile(r"sharding=(\{.*?\})(?=, \w+=|$)")
_DEVICES = re.compile(rf"\{{devices=(?:{_TILES}|\[([\d,]+)\]([\d,]+))")
_SHARDING_MESH = re.compile(rf"\{{{_MESH}, \[(.*?)\](?:[,}}])")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")


def labels_of(keys: Sequence[Hashable]) -> Labels:
    """One number for each different key, in the order in which they come."""
    seen: dict[Hashable, int] = {}
    return tuple(seen.setdefault(key, len(seen)) for key in keys)


@lru_cache(maxsize=4096)
def groups_of(attributes: str, devices: int) -> tuple[tuple[int, ...], ...] | None:
    """The groups of devices that a collective joins; None where the text is unknown."""
    if found := _GROUP_TILES.search(attributes):
        sizes, ids = integers(found[1]), _tiled(*found.groups())
        return tuple(tuple(map(int, row)) for row in ids.reshape(sizes[0], -1))
    if found := _GROUP_MESH.search(attributes):
        return _of_mesh(*found.groups())
    if found := _LISTS.search(attributes):
        lists = re.findall(r"\{([\d, ]*)\}", found[1] or "")
        groups = tuple(group for text in lists if (group := integers(text)))
        return groups or (tuple(range(devices)),)
    return None


@lru_cache(maxsize=4096)
def sources_of(attributes: str) -> tuple[tuple[int, int], ...]:
    """(from, to) of each pair of a collective-permute."""
    found = re.search(r"source_target_pairs=\{([\d,{}]*)\}", attributes)
    pairs = re.findall(r"\{(\d+),(\d+)\}", found[1]) if found else ()
    return tuple((int(a), int(b)) for a, b in pairs)


@lru_cache(maxsize=4096)
def shards_of(attributes: str, rank: int, devices: int) -> tuple[Labels, ...] | None:
    """Of each axis of a parameter, which part of it each device has."""
    found = _SHARDING.search(attributes)
    if found is None:
        return None
    text = found[1]
    if text.startswith(("{replicated", "{maximal")):
        return (labels_of([0] * devices),) * rank
    if tiled := _DEVICES.match(text):
        return _of_tiles(tiled, rank, devices)
    if meshed := _SHARDING_MESH.match(text):
        return _of_axes(meshed, rank)
    return None


def _of_tiles(found: re.Match[str], rank: int, devices: int):
    tile, source, order, listed, ids = found.groups()
    sizes = integers(tile or listed)
    if listed:
        placed = np.array(integers(ids)).reshape(sizes)
    else:
        placed = _tiled(tile, source, order)
    if placed.size != devices or len(sizes) < rank:
        return None
    at = np.empty((devices, len(sizes)), int)
    at[placed.ravel()] = np.indices(sizes).reshape(len(sizes), -1).T
    return tuple(labels_of(at[:, axis].tolist()) for axis in range(rank))


def _of_axes(found: re.Match[str], rank: int):
    axes, order, dimensions = found.groups()
    names, ids = _mesh(axes, order)
    parts = re.findall(r"\{([^}]*)\}", dimensions)
    if len(parts) != rank:
        return None
    return tuple(labels_of(_coordinates(names, ids, part)) for part in parts)


def _of_mesh(axes: str, order: str | None, joined: str):
    names, ids = _mesh(axes, order)
    inside = _coordinates(names, ids, joined)
    outside = _coordinates(names, ids, joined, rest=True)
    groups: dict[Hashable, list[tuple[Hashable, int]]] = {}
    for device, key in enumerate(outside):
        groups.setdefault(key, []).append((inside[device], device))
    return tuple(
        tuple(device for _, device in sorted(group)) for group in groups.values()
    )


def _mesh(axes: str, order: str | None) -> tuple[dict[str, int], np.ndarray]:
    """(sizes of the axes by their names, the device at each place)."""
    names = {name: int(size) for name, size in _SIZE.findall(axes)}
    sizes = tuple(names.values())
    if order and (tiled := _ORDER.match(order)):
        return names, _tiled(",".join(map(str, sizes)), *tiled.groups())
    count = int(np.prod(sizes))
    ids = integers(order) if order else range(count)
    return names, np.array(ids).reshape(sizes)


def _coordinates(
    names: dict[str, int], ids: np.ndarray, text: str, rest: bool = False
) -> list[tuple[int, ...]]:
    """Of each device, where it is along some axes; `rest`: along what is left."""
    places = np.indices(ids.shape).reshape(ids.ndim, -1)
    taken: list[np.ndarray] = []
    left = dict(zip(names, places, strict=True))
    for name, before, size in _AXIS.findall(text):
        place, whole = places[list(names).index(name)], names[name]
        if not size:
            taken.append(place)
            left.pop(name, None)
            continue
        # of an axis that is split: what lies before the part, the part, what is after
        after = whole // (int(before) * int(size))
        taken.append(place // after % int(size))
        left[name] = left[name] - place // after % int(size) * after
    columns = list(left.values()) if rest else taken
    rows = np.zeros((ids.size, len(columns)), int)
    if columns:
        rows[ids.ravel()] = np.stack(columns, axis=1)
    return [tuple(row) for row in rows.tolist()]


def _tiled(sizes: str, source: str, order: str | None) -> np.ndarray:
    """`[sizes]<=[source]T(order)`: the numbers from 0 on, turned and cut."""
    dims = integers(source)
    ids = np.arange(int(np.prod(dims))).reshape(dims)
    if order:
        ids = ids.transpose(integers(order))
    return ids.reshape(integers(sizes))
