"""The pieces of memory that an array takes on this process's devices."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

DEVICE = "device"  # the memory that the default backend's devices compute in


@dataclass(frozen=True)
class LivePiece:
    """What an array takes on one device.

    Attributes:
      device: its name.
      memory: "device", "pinned_host" and the like; of another backend its platform.
      address: tells pieces of one memory apart.
      bytes: in the layout that the device has.
    """

    device: str
    memory: str
    address: int
    bytes: int


def without_key(x: Any) -> Any:
    """Of random keys the array of their words, which is what `jax.live_arrays` has."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return x


def type_of(x: Any) -> str:
    """As reports have it: `f32[8,128]`."""
    return jax.typeof(x).str_short(short_dtypes=True)


def pieces_of(x: Any) -> list[LivePiece]:
    """The pieces of an array; none where it is deleted, also meanwhile."""
    try:
        return [*_pieces(x)]
    except RuntimeError:
        if x.is_deleted():
            return []
        raise


def placement_of(x: Any) -> str:
    """On how many devices of all processes it is, and how; "" of one device."""
    count = len(x.sharding.device_set)
    if count == 1:
        return ""
    how = "replicated" if x.sharding.is_fully_replicated else "sharded"
    return f"{how} over {count}"


def _pieces(x: Any) -> Iterator[LivePiece]:
    if x.is_deleted():
        return
    if len(x.sharding.device_set) == 1:
        if x.is_fully_addressable:
            (device,) = x.sharding.device_set
            yield _piece(x, device)
        return
    # JAX keeps the arrays of single shards beside the whole one. They have no memory of
    # their own: their addresses are these.
    for shard in x.addressable_shards:
        yield _piece(shard.data, shard.device)


def _piece(x: Any, device: Any) -> LivePiece:
    return LivePiece(str(device), _memory(x, device), _address(x), _bytes(x))


def _memory(x: Any, device: Any) -> str:
    if device.platform != jax.default_backend():
        return device.platform
    kind = x.sharding.memory_kind
    return DEVICE if kind in (None, device.default_memory().kind) else kind


def _address(x: Any) -> int:
    try:
        return x.unsafe_buffer_pointer()
    except Exception:  # a backend that has none: then an array shares with itself alone
        return id(x)


def _bytes(x: Any) -> int:
    try:  # 4-bit numbers and the tiles of a TPU take other sizes than `nbytes`
        return x.on_device_size_in_bytes()
    except Exception:
        return x.nbytes
