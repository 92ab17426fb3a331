"""`live_arrays`: the arrays of a process by name, or by type."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.core import Tracer

from jaxmem._checks import wrong_type, wrong_value
from jaxmem.frameworks import named_arrays
from jaxmem.monitoring._buffers import (
    DEVICE,
    LivePiece,
    pieces_of,
    placement_of,
    type_of,
    without_key,
)
from jaxmem.monitoring._live_array import LiveArray
from jaxmem.monitoring._live_arrays import LiveArrays

_ALLOWED = "a model, or a pytree with arrays of JAX in it"


def live_arrays(**named: Any) -> LiveArrays:
    """The arrays of JAX that are alive in this process, and the bytes they take.

    Arrays in the trees that are given are told by name and path, all others by type.
    What shares a buffer is counted once. The result has no reference to an array.

    Args:
      **named: models of any framework and pytrees of arrays, under names of your
        choice.

    Returns:
      A `LiveArrays`, which prints; `after.since(before)` tells what a step leaves.

    Raises:
      TypeError: a tree that has leaves, none of which is an array of JAX.
      ValueError: inside of a jitted function, where the arrays of a tree have no
        memory.

    Example::

      params, opt_state = state
      before = jaxmem.live_arrays(params=params, opt_state=opt_state)
      state, loss = jax.jit(step)(state, batch)
      print(jaxmem.live_arrays(params=state[0], opt_state=state[1]) - before)
    """
    alive = jax.live_arrays()  # before others are made of keys and of shards
    count = _Count()
    for name, tree in named.items():
        for path, x in _arrays(name, tree):
            count.add(x, name, path)
    # what is on several devices before its single shards, which may be in the list too
    for x in sorted(alive, key=_devices, reverse=True):
        if not x.is_deleted():
            count.add(x)
    return count.result()


def _arrays(name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    leaves = [*named_arrays(tree)]
    if any(isinstance(x, Tracer) for _, x in leaves):
        raise wrong_value(name, tree, "outside of jitted functions: this one is traced")
    arrays = [(path, x) for path, x in leaves if isinstance(x, jax.Array)]
    if leaves and not arrays:
        raise wrong_type(name, tree, _ALLOWED)
    yield from arrays


def _devices(x: Any) -> int:
    return 0 if x.is_deleted() else len(x.sharding.device_set)


@dataclass
class _Count:
    """Rows so far, and the pieces of memory that are in one of them.

    Attributes:
      rows: by what makes them one.
      by_device: of each row, bytes on each device.
      owners: which row has a piece.
    """

    rows: dict[tuple[str, ...], LiveArray] = field(default_factory=dict)
    by_device: dict[tuple[str, ...], dict[str, int]] = field(default_factory=dict)
    owners: dict[tuple[str, str, int], str] = field(default_factory=dict)

    def add(self, x: Any, name: str = "", path: str = "") -> None:
        """Adds an array to the row of its path, or of its type."""
        if x.is_deleted():
            row = LiveArray(name, path, type_of(x), deleted=1)
            self.rows[name, path, row.array] = row
            return
        pieces = pieces_of(without_key(x))
        new = [p for p in pieces if _place(p) not in self.owners]
        if new or (name and not pieces):
            self._add_new(x, name, path, new)
        elif name:
            other = self.owners[_place(pieces[0])]
            row = LiveArray(name, path, type_of(x), 1, shares=other or "another array")
            self.rows.setdefault((name, path, row.array), row)

    def _add_new(self, x: Any, name: str, path: str, pieces: list[LivePiece]) -> None:
        kind, placement = type_of(x), placement_of(x)
        memory = pieces[0].memory if pieces else "other processes"
        key = name, path, kind, memory, placement
        row = self.rows.get(key)
        row = row or LiveArray(name, path, kind, memory=memory, placement=placement)
        for piece in pieces:
            self.owners[_place(piece)] = row.place
            on = self.by_device.setdefault(key, {})
            on[piece.device] = on.get(piece.device, 0) + piece.bytes
        size = sum(piece.bytes for piece in pieces)
        self.rows[key] = replace(row, count=row.count + 1, bytes=row.bytes + size)

    def result(self) -> LiveArrays:
        """The rows, the largest first, and what they come to."""
        rows, devices, others = [], {}, {}
        for key, row in self.rows.items():
            on = self.by_device.get(key, {})
            rows.append(replace(row, device_bytes=max(on.values(), default=0)))
            if row.memory != DEVICE:
                others[row.memory] = others.get(row.memory, 0) + row.bytes
                continue
            for device, size in on.items():
                devices[device] = devices.get(device, 0) + size
        rows.sort(key=lambda row: (-row.bytes, row.name, row.path, row.array))
        others = {memory: size for memory, size in others.items() if size}
        return LiveArrays(tuple(rows), dict(sorted(devices.items())), others)


def _place(piece: LivePiece) -> tuple[str, str, int]:
    return piece.device, piece.memory, piece.address
