"""Reports on disk, so that a step already compiled is not compiled again.

The key is made of the lowered module (source lines included, as the report shows
them), the target, and the versions of everything that has a say in the numbers. The
folder is the platform's cache folder, or `JAXMEM_CACHE_DIR`; the oldest entries go
when it grows past a limit.
"""

import functools
import hashlib
import os
import pickle
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

_MAX_BYTES = 512 * 2**20
_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-pjrt", "jax-cuda12-pjrt")


def cache_dir() -> Path:
    """Where the reports lie."""
    if folder := os.environ.get("JAXMEM_CACHE_DIR"):
        return Path(folder)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "jaxmem"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "jaxmem"
    if sys.platform == "win32" and (folder := os.environ.get("LOCALAPPDATA")):
        return Path(folder) / "jaxmem" / "cache"
    return Path.home() / ".cache" / "jaxmem"


def key_of(*parts: Any) -> str:
    """A hash of the parts (bytes, or what `repr` tells apart) and the versions."""
    digest = hashlib.sha256(_versions().encode())
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def load(key: str) -> Any:
    """What was stored under the key; None if nothing readable is there."""
    path = cache_dir() / f"{key}.pickle"
    try:
        value = pickle.loads(path.read_bytes())
        os.utime(path)
        return value
    except FileNotFoundError:
        return None
    except Exception:  # torn or foreign: as good as absent, and written anew
        return None


def store(key: str, value: Any) -> None:
    """Keeps a value; a folder that cannot be written is told of once."""
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            pickle.dump(value, file, protocol=5)
        os.replace(file.name, folder / f"{key}.pickle")
        _trim(folder)
    except OSError as error:
        _tell(str(folder), str(error))


@functools.cache
def _tell(folder: str, error: str) -> None:
    warnings.warn(
        f"jaxmem cannot keep compiled reports in {folder} ({error}): every estimate "
        "compiles anew; set JAXMEM_CACHE_DIR to a folder that can be written",
        stacklevel=4,
    )


def _trim(folder: Path) -> None:
    """Drops the entries used longest ago, down to the limit."""
    entries = sorted(
        ((stat.st_mtime, stat.st_size, path) for path, stat in _entries(folder)),
        reverse=True,
    )
    total = 0
    for _, size, path in entries:
        total += size
        if total > _MAX_BYTES:
            path.unlink(missing_ok=True)


def _entries(folder: Path):
    for path in folder.glob("*.pickle"):
        try:
            yield path, path.stat()
        except FileNotFoundError:
            pass  # another process trims too


@functools.cache
def _versions() -> str:
    """Of the compilers, and of the code that makes the report."""
    from jaxmem.memory._targets import version_of

    sources = sorted(Path(__file__).parent.glob("*.py"))
    own = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    return repr([own, *((name, version_of(name)) for name in _PACKAGES)])
