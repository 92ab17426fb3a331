"""Which compiler there is for a platform, and where it comes from.

Wheels in the environment come first, where their versions are the ones that belong to
the running jax; then those in the folder of `jaxmem targets --install`. Where NVIDIA's
wheel of the assembler is missing, that of a CUDA toolkit of the machine does.
"""

import functools
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import jax
import jaxlib

from jaxmem._remedies import jaxmem_line
from jaxmem.chips._folder import PLATFORMS, own_dir, versions_in

_KINDS = {platform: kind for kind, platform in PLATFORMS.items()}
_PTXAS = Path("/usr/local/cuda/bin/ptxas")  # where XLA looks besides PATH
_NVCC = {"cuda13": "nvidia-cuda-nvcc", "cuda12": "nvidia-cuda-nvcc-cu12"}


@dataclass(frozen=True)
class Compiler:
    """What compiles for a platform.

    Attributes:
      packages: names and versions of what is there.
      folder: the folder that a process needs on its path; "" for none.
      source: what it is and where it comes from; empty where it is incomplete.
      why_not: what is missing, and the line that installs it; empty if complete.
      remark: of a version that is not the one that belongs to this jax.
    """

    packages: tuple[tuple[str, str], ...] = ()
    folder: str = ""
    source: str = ""
    why_not: str = ""
    remark: str = ""


def version_of(package: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def compiler_for(platform: str) -> Compiler:
    """The compiler for "cpu", "cuda" or "tpu"."""
    if platform == "cpu":
        return Compiler(source="jaxlib")
    folder = own_dir(_KINDS[platform])
    # asked for each time: another process may have installed it meanwhile
    return _found(platform, str(folder) if folder.is_dir() else "")


def compiler_folders() -> tuple[str, ...]:
    """The folders that a process which compiles needs on its path."""
    found = (compiler_for(platform).folder for platform in _KINDS)
    return tuple(folder for folder in found if folder)


def compiler_versions() -> tuple[tuple[str, str], ...]:
    """The packages of all compilers, on which compiled bytes depend."""
    return tuple(pair for p in _KINDS for pair in compiler_for(p).packages)


def requirements(platform: str) -> tuple[str, ...]:
    """What to install for a platform, as pip takes it; nothing where all matches."""
    own = _in_environment(platform)
    return tuple(
        f"{name}{wanted}"
        for name, wanted in _packages(platform).items()
        if name not in own or not _matches(own[name], wanted)
    )


def forget_compilers() -> None:
    """After an installation: what was found before no longer holds."""
    _found.cache_clear()


@functools.cache
def _found(platform: str, folder: str) -> Compiler:
    wanted = _packages(platform)
    inside, beside = _in_environment(platform), {}
    if requirements(platform) and folder:
        beside = versions_in(Path(folder))
    there = inside | {name: v for name, v in beside.items() if name in wanted}
    if platform == "cuda" and not there.keys() & _NVCC.values():
        there |= _local_nvcc(wanted)
    missing = [name for name in wanted if name not in there]
    wrong = [n for n in wanted if n in there and not _matches(there[n], wanted[n])]
    packages = tuple(sorted((n, v) for n, v in there.items() if n in wanted))
    remark = "; ".join(_mismatch(n, there[n], wanted[n]) for n in wrong)
    # The CUDA plugin's interface changes between versions of jax; libtpu's is stable.
    if missing or (wrong and platform == "cuda"):
        what = remark or f"{missing[0]} is missing"
        line = jaxmem_line(f"targets --install {_KINDS[platform]}")
        return Compiler(packages, why_not=f"{what}: {line}")
    used = {name: v for name, v in beside.items() if name in wanted}
    first = next(iter(wanted))
    place = "jaxmem's folder" if used else "the environment"
    source = f"{first} {there[first]} of {place}"
    return Compiler(packages, folder if used else "", source, remark=remark)


def _packages(platform: str) -> dict[str, str]:
    """Names of packages and the versions that they need: "==1.2.*", or "" for any."""
    if platform == "tpu":
        return {"libtpu": _libtpu_of_jax()}
    own = f"=={jaxlib.__version__}"  # to which a plugin compares its own
    cuda = "cuda13"
    if _matches(version_of("jax-cuda12-pjrt") or "", own):
        cuda = "cuda12"  # two plugins for one platform would exclude each other
    return {f"jax-{cuda}-plugin": own, f"jax-{cuda}-pjrt": own, _NVCC[cuda]: ""}


def _local_nvcc(wanted: dict[str, str]) -> dict[str, str]:
    """That of a CUDA toolkit which XLA finds here, in the place of NVIDIA's wheel."""
    kind = next(kind for kind, name in _NVCC.items() if name in wanted)
    version = _ptxas_version(shutil.which("ptxas") or str(_PTXAS))
    enough = version and int(version.partition(".")[0]) >= int(
        kind.removeprefix("cuda")
    )
    return {_NVCC[kind]: version} if enough else {}


@functools.cache
def _ptxas_version(path: str) -> str:
    """The version of an assembler of CUDA; "" where there is none."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True)
    except OSError:
        return ""
    match = re.search(r"release [\d.]+, V([\d.]+)", said.stdout)
    return match[1] if match else ""


def _libtpu_of_jax() -> str:
    """The version of libtpu that jax's own extra `tpu` names; "" for any."""
    for requirement in metadata.requires("jax") or ():
        match = re.match(r"libtpu\s*(==[\w.*]+)\s*;", requirement)
        if match and "tpu" in requirement.partition(";")[2]:
            return match[1]
    return ""


def _in_environment(platform: str) -> dict[str, str]:
    found = ((name, version_of(name)) for name in _packages(platform))
    return {name: version for name, version in found if version}


def _matches(version: str, wanted: str) -> bool:
    """Whether a version is the wanted one: "0.0.42.1" is "==0.0.42.*"."""
    exact = wanted.removeprefix("==")
    if exact.endswith(".*"):
        return f"{version}.".startswith(exact.removesuffix("*"))
    # a wheel may be built anew without another release: 0.10.2.post1
    return not exact or re.sub(r"\.(post|dev)\d+$", "", version) == exact


def _mismatch(name: str, version: str, wanted: str) -> str:
    needed = wanted.removeprefix("==")
    return f"{name} is {version}, that of jax {jax.__version__} is {needed}"
