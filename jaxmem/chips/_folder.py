"""The folder of compilers that jaxmem installs for its own processes alone.

Wheels of jax's plugins register themselves in every program that finds them: without
their device each prints messages. In a folder of their own, which only the processes
that compile have on their path, no other program sees them.
"""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import jax

PLATFORMS = {"gpu": "cuda", "tpu": "tpu"}  # by the names that users give


def home() -> Path:
    """The user's home; of a user who has none, a folder that is not there."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.sep, "no-home")


def targets_dir() -> Path:
    """The folder of all compilers: `JAXMEM_TARGETS_DIR`, or in the user's data."""
    if folder := os.environ.get("JAXMEM_TARGETS_DIR"):
        return Path(folder)
    if folder := os.environ.get("XDG_DATA_HOME"):
        return Path(folder) / "jaxmem" / "targets"
    if sys.platform == "darwin":
        return home() / "Library" / "Application Support" / "jaxmem" / "targets"
    if sys.platform == "win32" and (folder := os.environ.get("LOCALAPPDATA")):
        return Path(folder) / "jaxmem" / "targets"
    return home() / ".local" / "share" / "jaxmem" / "targets"


def own_dir(kind: str) -> Path:
    """The folder of "gpu" or "tpu" for this jax, Python and kind of machine."""
    tag = f"{sys.implementation.cache_tag}-{sys.platform}-{platform.machine()}"
    return targets_dir() / jax.__version__ / tag / kind


def versions_in(folder: Path) -> dict[str, str]:
    """The distributions in a folder and their versions."""
    found = metadata.distributions(path=[str(folder)])
    return {d.name.lower().replace("_", "-"): d.version for d in found}


@dataclass(frozen=True)
class CompilerFolder:
    """Compilers that `jaxmem targets --install` has installed.

    Attributes:
      kind: "gpu" or "tpu".
      jax_version: of the jax that they are for.
      path: where they are.
      packages: names and versions.
      bytes: on disk.
      used: whether this jax and this Python take them.
    """

    kind: str
    jax_version: str
    path: Path
    packages: dict[str, str]
    bytes: int
    used: bool


def folder_of(path: Path) -> CompilerFolder:
    """What is in a folder of compilers."""
    size = sum(p.lstat().st_size for p in path.rglob("*") if not p.is_dir())
    kind, version = path.name, path.parents[1].name
    used = path == own_dir(kind)
    return CompilerFolder(kind, version, path, versions_in(path), size, used)


def installed_folders() -> Iterator[CompilerFolder]:
    """All folders of compilers, those of other versions of jax among them."""
    for path in sorted(targets_dir().glob("*/*/*")):
        if path.name in PLATFORMS and path.is_dir():
            yield folder_of(path)


def remove_folder(folder: CompilerFolder) -> None:
    """Removes compilers, and the folders around them that are then empty."""
    gone = folder.path.with_name(f".{folder.kind}-removed-{os.getpid()}")
    os.replace(folder.path, gone)  # no process finds a half of them
    shutil.rmtree(gone)
    for path in (*folder.path.parents[:2],):
        locks = {p for p in path.iterdir() if p.suffix == ".lock"}
        if set(path.iterdir()) - locks:
            return
        shutil.rmtree(path)
