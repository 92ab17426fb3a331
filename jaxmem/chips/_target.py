"""The chips as a user names them, and whether this installation compiles for them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxmem._bytes import format_bytes
from jaxmem.chips._compilers import compiler_for
from jaxmem.chips._table import CHIPS
from pallas_kernels.chips import chip_name

_TITLES = "target", "memory", "device", "compiles here", "compiler"


@dataclass(frozen=True)
class Target:
    """A chip that `jaxmem.estimate` can compile for.

    Attributes:
      name: what to pass as `target=`.
      platform: "cpu", "cuda" or "tpu".
      memory_bytes: bytes a program can use on one device; None for cpu.
      device: the vendor's name of the device.
      available: whether this installation can compile for it.
      why_not: what is missing, and the line that installs it; empty if available.
      compiler: what compiles for it, and where that comes from; empty if there is none.
      remark: of a compiler whose version is not the one that belongs to this jax.
    """

    name: str
    platform: str
    memory_bytes: int | None
    device: str
    available: bool = True
    why_not: str = ""
    compiler: str = ""
    remark: str = ""

    def _cells(self) -> Iterator[str]:
        yield self.name
        yield format_bytes(self.memory_bytes) if self.memory_bytes else "-"
        yield self.device
        yield "yes" if self.available else "no"
        yield self.compiler or "-"


class Targets(tuple[Target, ...]):
    """The rows of `targets()`; prints as a table."""

    def __str__(self) -> str:
        rows = _TITLES, *(tuple(t._cells()) for t in self)
        lines = (
            f"{n:<9} {m:>10}  {d:<24} {a:<13}  {c}".rstrip() for n, m, d, a, c in rows
        )
        return "\n".join([*lines, *self._notes()])

    def __repr__(self) -> str:
        return str(self)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(*_TITLES)
        for target in self:
            table.add_row(*map(Text, target._cells()))
        # not in the table, where a line to copy would be broken
        return Group(table, *(Text(note) for note in self._notes()))

    def _notes(self) -> Iterator[str]:
        """What is missing and what does not match, each once, with the platform."""
        platforms = {t.platform: t for t in self}
        for platform, target in platforms.items():
            for note in filter(None, (target.why_not, target.remark)):
                yield f"{platform}: {note}"


def targets() -> Targets:
    """The known chips, their memory, and whether this installation compiles for each.

    Returns:
      One `Target` a chip, in a tuple that prints as a table (also under `rich`). A chip
      that cannot be compiled for says why, with the line that installs what is missing.

    Example::

      print(jaxmem.targets())
      available = [target.name for target in jaxmem.targets() if target.available]
    """
    return Targets(map(_target, CHIPS))


def get_target(name: str | Target | None, *, check: bool = True) -> Target:
    """The target of a name, "cpu" for None; `check`: it can be compiled for here."""
    name = name.name if isinstance(name, Target) else "cpu" if name is None else name
    if not isinstance(name, str) or name not in CHIPS:
        raise ValueError(
            f"unknown target {name!r}: jaxmem knows {', '.join(CHIPS)} "
            "(see jaxmem.targets())"
        )
    target = _target(name)
    if check and not target.available:
        raise RuntimeError(f"cannot compile for {name!r} here: {target.why_not}")
    return target


def local_target() -> Target:
    """The target of this process's first device, with the bytes that it may take there.

    A chip is known by the word for it in the device's name: "NVIDIA H100 NVL" is an
    "h100", and an "a100" has the 40 or the 80 GB that the device reports.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return get_target("cpu")
    name = chip_name(device)
    name = f"tpu-{name}" if device.platform == "tpu" else name
    if name not in CHIPS:
        raise ValueError(
            f"target=None: this process's device is {device.device_kind!r}, which is "
            f"none of {', '.join(CHIPS)}: name the one that is meant"
        )
    limit = (device.memory_stats() or {}).get("bytes_limit")
    target = get_target(name, check=False)
    return replace(target, memory_bytes=limit or target.memory_bytes)


def _target(name: str) -> Target:
    chip = CHIPS[name]
    platform, device = chip.compiler.platform, chip.compiler.device
    found = compiler_for(platform)
    state = not found.why_not, found.why_not, found.source, found.remark
    return Target(name, platform, chip.memory_bytes, device, *state)


def is_gpu(target: str) -> bool:
    """Whether a target is an NVIDIA GPU; raises where there is none of this name."""
    return get_target(target, check=False).platform == "cuda"
