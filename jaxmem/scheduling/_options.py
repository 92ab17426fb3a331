"""How `schedule` was called, as plain data."""

import math
from dataclasses import dataclass
from typing import Any

from jaxmem._checks import check_float
from jaxmem.chips import get_target, local_target
from jaxmem.memory import Target, parse_bytes
from jaxmem.scheduling.plan.plan import Plan


def check_seconds(seconds: float | None) -> None:
    if seconds is not None:
        check_float("search_seconds", seconds, above=0)


def room_and_target(
    budget: int | str | None, target: str | Target | None
) -> tuple[int | None, str | None]:
    """Bytes, and the name of the chip; a budget without one is for this process's."""
    room = None if budget is None else _bytes_above_zero("budget", budget)
    if target is not None:
        return room, get_target(target).name
    return room, None if room is None else local_target().name


def host_room(
    offload: bool, host_budget: int | str | None, room: int | None
) -> int | None:
    """Bytes that may be offloaded; ValueError where nothing asks for them."""
    if offload and room is None:
        raise ValueError("offload=True: needs a budget that says how much is enough")
    if host_budget is None:
        return None
    if not offload:
        raise ValueError(f"host_budget={host_budget!r}: needs offload=True")
    return _bytes_above_zero("host_budget", host_budget)


def _bytes_above_zero(name: str, given: int | str) -> int:
    size = parse_bytes(given, name)
    if size <= 0:
        raise ValueError(f"{name}={given!r}: must be more than 0 bytes")
    return size


@dataclass(frozen=True)
class Options:
    """How `schedule` was called."""

    donate: tuple[Any, ...] | None
    static: tuple[Any, ...]
    clip: str | None
    budget: int | None
    target: str | None
    progress: bool
    plan: Plan | None = None
    named: bool = False
    offload: bool = False
    host_budget: int | None = None
    compiler_options: dict[str, Any] | None = None
    search_seconds: float | None = None
    tile: bool = False
    quick: bool = False
    cache: bool = True
    verify: bool = False
    audit: bool = True

    @property
    def host(self) -> float:
        """Bytes of a device's residuals that may be in the host's memory."""
        if not self.offload:
            return 0
        return math.inf if self.host_budget is None else self.host_budget
