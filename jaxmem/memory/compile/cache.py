"""A cache on disk of what the compiler said, so that no step is compiled twice.

The key is a hash of the lowered module (with the source lines that a report shows), of
the target, and of the versions of everything that the numbers depend on.
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

from jaxmem.chips import compiler_versions, version_of

_MAX_BYTES = 512 * 2**20


def cache_dir() -> Path:
    """The folder of the cache."""
    if folder := os.environ.get("JAXMEM_CACHE_DIR"):
        return Path(folder)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "jaxmem"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "jaxmem"
    if sys.platform == "win32" and (folder := os.environ.get("LOCALAPPDATA")):
        return Path(folder) / "jaxmem" / "cache"
    return Path.home() / ".cache" / "jaxmem"


def key_of(*values: Any) -> str:
    """A hash of bytes, or of the `repr` of other values, and of the versions."""
    digest = hashlib.sha256(_versions().encode())
    for value in values:
        data = value if isinstance(value, bytes) else repr(value).encode()
        # the length separates a value from the next one
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def load(key: str) -> Any:
    """The value stored under a key; None if there is no readable one."""
    path = cache_dir() / f"{key}.pickle"
    try:
        value = pickle.loads(path.read_bytes())
        os.utime(path)  # `_trim` removes what was used longest ago
        return value
    except FileNotFoundError:
        return None
    except Exception:  # half written, or of other code: it will be overwritten
        return None


def store(key: str, value: Any) -> None:
    """Stores a value; warns once of a folder that cannot be written."""
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            pickle.dump(value, file, protocol=5)
        os.replace(file.name, folder / f"{key}.pickle")
        _trim(folder)
    except OSError as error:
        _warn_once(str(folder), str(error))


@functools.cache
def _warn_once(folder: str, error: str) -> None:
    warnings.warn(
        f"jaxmem cannot store compiled reports in {folder} ({error}), so that every "
        "estimate compiles: set JAXMEM_CACHE_DIR to a folder that can be written",
        stacklevel=4,
    )


def _trim(folder: Path) -> None:
    """Removes the entries used longest ago, down to the limit."""
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


def _versions() -> str:
    """The versions of the compilers, and a hash of the code that reads their texts."""
    jax = [(name, version_of(name)) for name in ("jax", "jaxlib")]
    # a compiler may be installed while this process runs
    return repr([_code(), *jax, *compiler_versions()])


@functools.cache
def _code() -> str:
    package = Path(__file__).parents[2]
    patterns = ("*.py", "chips/*.py", "memory/**/*.py")
    sources = sorted(path for pattern in patterns for path in package.glob(pattern))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
