"""How `schedule` was called, as plain data."""

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
    room = None if budget is None else parse_bytes(budget, "budget")
    if room is not None and room <= 0:
        raise ValueError(f"budget={budget!r}: must be more than 0 bytes")
    if target is not None:
        return room, get_target(target).name
    return room, None if room is None else local_target().name


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
    compiler_options: dict[str, Any] | None = None
    search_seconds: float | None = None
    tile: bool = False
    quick: bool = False
    cache: bool = True
    verify: bool = False
    audit: bool = True
