"""A cache on disk of what compilers said and searches found: nothing is done twice.

The key is a hash of the lowered module (with the source lines that a report shows), of
the target, and of the versions of everything that the numbers depend on.
"""

import contextlib
import functools
import hashlib
import os
import pickle
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from jaxmem.chips import compiler_versions, home, version_of

_MAX_BYTES = 512 * 2**20
_DIGEST = 32  # bytes at the end of an entry
_PART = ".part"  # of a file that is being written
_WRITING = 3600.0  # seconds after which nobody is writing it any more


def cache_dir() -> Path:
    """The folder of the cache."""
    if folder := os.environ.get("JAXMEM_CACHE_DIR"):
        return Path(folder)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "jaxmem"
    if sys.platform == "darwin":
        return home() / "Library" / "Caches" / "jaxmem"
    if sys.platform == "win32" and (folder := os.environ.get("LOCALAPPDATA")):
        return Path(folder) / "jaxmem" / "cache"
    return home() / ".cache" / "jaxmem"


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
    """The value stored under a key, None if there is none; a damaged one is removed."""
    path = _path(key)
    try:
        data = path.read_bytes()
    except OSError:  # there is none, or none that this user may read
        return None
    payload, digest = data[:-_DIGEST], data[-_DIGEST:]
    try:
        if _digest(payload) != digest:
            raise pickle.UnpicklingError("not what was stored")
        value = pickle.loads(payload)
    except Exception as error:
        with contextlib.suppress(OSError):
            path.unlink()
        _warn_once(
            f"jaxmem has dropped an entry of its cache in {path.parent} that was "
            f"damaged ({error}): its entry is computed again"
        )
        return None
    with contextlib.suppress(OSError):  # of a folder that is only read
        os.utime(path)  # `_trim` removes what was used longest ago
    return value


def store(key: str, value: Any) -> None:
    """Stores a value; warns once of a folder that cannot be written."""
    payload, path = pickle.dumps(value, protocol=5), _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, payload + _digest(payload))
        _trim(path.parent)
    except OSError as error:
        _warn_once(
            f"jaxmem cannot store what it has found in {path.parent} ({error}), so "
            "that estimates and searches are not reused: set "
            "JAXMEM_CACHE_DIR to a folder that can be written"
        )


def _path(key: str) -> Path:
    return cache_dir() / f"{key}.pickle"


def _digest(payload: bytes) -> bytes:
    """What tells damaged bytes, which might still be read as other numbers."""
    return hashlib.sha256(payload).digest()


def _write(path: Path, data: bytes) -> None:
    """Writes a file that others see only once it is whole."""
    file = tempfile.NamedTemporaryFile(dir=path.parent, suffix=_PART, delete=False)
    try:
        with file:
            file.write(data)
        os.replace(file.name, path)
    except BaseException:
        os.unlink(file.name)
        raise


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=4)


def _trim(folder: Path) -> None:
    """Removes the entries used longest ago, and what killed processes have left."""
    entries = sorted(
        ((stat.st_mtime, stat.st_size, path) for path, stat in _entries(folder)),
        reverse=True,
    )
    total = 0
    for _, size, path in entries:
        total += size
        if total > _MAX_BYTES:
            path.unlink(missing_ok=True)
    for path, stat in _entries(folder, _PART):
        if time.time() - stat.st_mtime > _WRITING:
            path.unlink(missing_ok=True)


def _entries(folder: Path, suffix: str = ".pickle"):
    for entry in os.scandir(folder):
        if not entry.name.endswith(suffix):
            continue
        try:
            yield Path(entry.path), entry.stat()
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
