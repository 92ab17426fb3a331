"""Installs compilers into a folder of their own: `jaxmem targets --install`.

The work is pip's or uv's. What they install appears under its name only once it is
complete, and two processes that install the same wait for each other.
"""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from jaxmem._bytes import format_bytes
from jaxmem._checks import check_choice
from jaxmem.chips._compilers import compiler_for, forget_compilers, requirements
from jaxmem.chips._folder import PLATFORMS, CompilerFolder, folder_of, own_dir

# About what each takes on disk; told before it is downloaded, the exact bytes after it.
SIZES = {"gpu": 760 * 10**6, "tpu": 720 * 10**6}
# The plugins' wheels are made for Linux alone.
_SYSTEM = "linux"
# The CUDA wheels' common folder: other wheels may have made a package of theirs, which
# would hide this one.
_NVIDIA = "__path__ = __import__('pkgutil').extend_path(__path__, __name__)\n"


class InstallError(RuntimeError):
    """Compilers that could not be installed, and why."""


def install_compilers(
    kind: str = "all", tell: Callable[[str], None] = lambda text: None
) -> tuple[CompilerFolder, ...]:
    """Installs the compilers of the running jax, where they are not there already.

    Args:
      kind: "gpu", "tpu" or "all".
      tell: is called with each line that says what is being done.

    Returns:
      What was installed; nothing where all is there.

    Raises:
      ValueError: another `kind`.
      InstallError: no wheels for this system, no connection, no room, a folder that
        cannot be written.
    """
    check_choice("kind", kind, ("all", *PLATFORMS))
    done = []
    for name in PLATFORMS if kind == "all" else (kind,):
        wanted = requirements(PLATFORMS[name])
        compiler = compiler_for(PLATFORMS[name])
        if not wanted or (compiler.source and not compiler.remark):
            tell(f"{name}: nothing to install, there is {compiler.source}")
            continue
        try:
            done.append(_install(name, wanted, tell))
        except OSError as error:
            raise InstallError(
                f"{error}: set JAXMEM_TARGETS_DIR to a folder that can be written"
            ) from error
    return tuple(done)


def _install(
    kind: str, wanted: tuple[str, ...], tell: Callable[[str], None]
) -> CompilerFolder:
    if sys.platform != _SYSTEM:
        raise InstallError(f"{kind}: there are compilers for Linux alone")
    final = own_dir(kind)
    final.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(final, tell):
        if _is_complete(kind):
            tell(f"{kind}: another process has installed it")
            return folder_of(final)
        _check_room(kind, final.parent)
        tell(
            f"{kind}: installing {' '.join(wanted)} for jax {jax.__version__} into "
            f"{final}, about {format_bytes(SIZES[kind])}"
        )
        for left in final.parent.glob(f".{kind}-*"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        new = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{kind}-"))
        try:
            _run_installer(kind, new, wanted, tell)
            _put_in_place(new, final)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    forget_compilers()
    folder = folder_of(final)
    tell(f"{kind}: installed, {format_bytes(folder.bytes)} in {final}")
    return folder


def _is_complete(kind: str) -> bool:
    forget_compilers()
    compiler = compiler_for(PLATFORMS[kind])
    return bool(compiler.folder) and not compiler.remark


@contextlib.contextmanager
def _only_one(final: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Waits for another process that installs the same."""
    import fcntl  # on Linux alone, like the compilers

    with open(final.with_suffix(".lock"), "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"{final.name}: another process is installing it, waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_room(kind: str, folder: Path) -> None:
    # the wheels themselves are there beside what is unpacked from them
    free, needed = shutil.disk_usage(folder).free, 2 * SIZES[kind]
    if free < needed:
        raise InstallError(
            f"{kind}: {folder} has {format_bytes(free)} of free space, and "
            f"{format_bytes(needed)} are needed: set JAXMEM_TARGETS_DIR to a folder "
            "that has them"
        )


def _run_installer(
    kind: str, folder: Path, wanted: tuple[str, ...], tell: Callable[[str], None]
) -> None:
    command = [*_installer(), "--target", str(folder), *wanted]
    # a `--user` of the user's own configuration excludes a target
    environment = {**os.environ, "PIP_USER": "0"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    lines = []
    with subprocess.Popen(command, env=environment, **streams) as process:
        try:
            for line in process.stdout or ():
                lines.append(line.strip())
                if "Downloading" in line:
                    tell(f"{kind}: {line.strip()}")
        except BaseException:  # an interrupt: the installer must not go on alone
            process.kill()
            raise
    if process.returncode:
        raise InstallError(_failure(kind, wanted, lines))


def _installer() -> list[str]:
    """The command that installs into this Python's kind of folder."""
    if importlib.util.find_spec("pip") is not None:
        flags = "--disable-pip-version-check --progress-bar off --retries 2"
        pip = [sys.executable, "-m", "pip", "install", *flags.split()]
        return [*pip, "--no-input", "--only-binary=:all:"]
    if shutil.which("uv") is not None:
        return ["uv", "pip", "install", "--python", sys.executable]
    raise InstallError(
        f"there is neither pip nor uv: run {sys.executable} -m ensurepip first"
    )


def _failure(kind: str, wanted: tuple[str, ...], lines: list[str]) -> str:
    errors = [line for line in lines if line.lower().startswith(("error", "×"))]
    reason = (errors or [line for line in lines if line] or ["no message"])[0]
    text = f"{kind}: {' '.join(wanted)} could not be installed: {reason}"
    if any("onnection" in line or "from versions: none" in line for line in lines):
        text += (
            "; without a connection to the package index, put the wheels into a folder "
            "and set PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER"
        )
    return text


def _put_in_place(new: Path, final: Path) -> None:
    common = new / "nvidia"
    if common.is_dir() and not (common / "__init__.py").exists():
        (common / "__init__.py").write_text(_NVIDIA)
    new.chmod(0o755)  # a temporary folder is its owner's alone
    if final.exists():  # incomplete, or of another version
        old = final.with_name(f".{final.name}-old")
        os.replace(final, old)
        shutil.rmtree(old, ignore_errors=True)
    os.replace(new, final)
