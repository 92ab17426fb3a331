"""The chips as a user names them, and whether this installation compiles for them."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import jax

from jaxmem._bytes import format_bytes
from jaxmem.chips._table import CHIPS

INSTALL = 'pip install "jaxmem[targets]"'


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
    """

    name: str
    platform: str
    memory_bytes: int | None
    device: str
    available: bool = True
    why_not: str = ""

    def _cells(self) -> Iterator[str]:
        yield self.name
        yield format_bytes(self.memory_bytes) if self.memory_bytes else "-"
        yield self.device
        yield "yes" if self.available else f"no: {self.why_not}"


class Targets(tuple[Target, ...]):
    """The rows of `targets()`; prints as a table."""

    def __str__(self) -> str:
        titles = "target", "memory", "device", "compiles here"
        rows = (titles, *(tuple(t._cells()) for t in self))
        return "\n".join(f"{n:<9} {m:>10}  {d:<24} {c}" for n, m, d, c in rows)

    def __repr__(self) -> str:
        return str(self)

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table("target", "memory", "device", "compiles here")
        for target in self:
            # rich would take the brackets of "jaxmem[targets]" for markup
            table.add_row(*(cell.replace("[", r"\[") for cell in target._cells()))
        return table


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
    """The target of this process's first device."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return get_target("cpu")
    for target in targets():
        if target.device.lower() == device.device_kind.lower():
            return target
    raise ValueError(
        f"target=None: this process's device is {device.device_kind!r}, which is none "
        f"of {', '.join(CHIPS)}: name the one that is meant"
    )


def _target(name: str) -> Target:
    chip = CHIPS[name]
    platform, device = chip.compiler.platform, chip.compiler.device
    missing = _missing(platform)
    return Target(name, platform, chip.memory_bytes, device, not missing, missing)


@functools.cache
def _missing(platform: str) -> str:
    """Why this installation cannot compile for a platform; empty if it can."""
    if platform == "cpu":
        return ""
    if platform == "tpu":
        return "" if version_of("libtpu") else f"libtpu is missing: {INSTALL}"
    assemblers = {"cuda13": "nvidia-cuda-nvcc", "cuda12": "nvidia-cuda-nvcc-cu12"}
    for cuda, nvcc in assemblers.items():
        plugin = version_of(f"jax-{cuda}-pjrt")
        if not plugin or not version_of(f"jax-{cuda}-plugin"):
            continue
        # The plugin's C interface changes between minor versions of jax.
        if _release(plugin) != _release(jax.__version__):
            return (
                f"jax-{cuda}-pjrt is {plugin}, jax is {jax.__version__}: they must be "
                f"of one version ({INSTALL})"
            )
        return "" if version_of(nvcc) else f"{nvcc} is missing: {INSTALL}"
    return f"jax's CUDA plugin is missing: {INSTALL}"


def _release(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:3])


def version_of(package: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
