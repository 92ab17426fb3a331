"""What devices measure at one moment, as numbers under the names that are logged."""

from collections.abc import Sequence
from typing import Any

from jaxmem.memory import fragmentation

Figures = dict[str, int | float]

# our name -> that of `memory_stats`, and which of several devices' values counts
_NAMES = {
    "peak_bytes": ("peak_bytes_in_use", max),
    "bytes_in_use": ("bytes_in_use", max),
    "bytes_limit": ("bytes_limit", min),
    "largest_free_block_bytes": ("largest_free_block_bytes", min),
}
_OF_EACH = "peak_bytes", "bytes_in_use"


def keeps_statistics(device: Any) -> bool:
    """Whether a device's allocator tells what is allocated; the CPU's does not."""
    return bool(device.memory_stats())


def figures_of(devices: Sequence[Any]) -> Figures:
    """The figures of the device that has least room, and of each where are several."""
    every = [d.memory_stats() or {} for d in devices]
    figures: Figures = {}
    for name, (theirs, chosen) in _NAMES.items():
        if found := [int(stats[theirs]) for stats in every if theirs in stats]:
            figures[name] = chosen(found)
    parts = [part for stats in every if (part := _fragmentation(stats)) is not None]
    if parts:
        figures["fragmentation"] = max(parts)
    if len(devices) > 1:
        for device, stats in zip(devices, every, strict=True):
            for name in _OF_EACH:
                if (theirs := _NAMES[name][0]) in stats:
                    figures[f"device_{device.id}/{name}"] = int(stats[theirs])
    return figures


def _fragmentation(stats: dict[str, Any]) -> float | None:
    return fragmentation(
        stats.get("pool_bytes") or stats.get("bytes_limit"),
        stats.get("bytes_in_use"),
        stats.get("largest_free_block_bytes"),
    )
