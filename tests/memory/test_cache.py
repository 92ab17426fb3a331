"""The cache on disk: what is damaged, cut short, or cannot be written."""

import errno
import os
import subprocess
import tempfile
import time
import warnings

import pytest

from jaxmem.memory import estimate
from jaxmem.memory.compile import cache
from jaxmem.memory.compile import pool as pooling
from tests.memory.test_estimate import W, X, sgd
from tests.memory.test_estimate import own_cache as own_cache
from tests.sets import some_fast

ENTRY = {"memory": {"temp": 4096}, "texts": b"module" * 100}


@pytest.fixture(autouse=True)
def told_anew():
    cache._warn_once.cache_clear()


def _zeroed(data: bytes) -> bytes:
    return data[:200] + bytes(100) + data[300:]


def _other_number(data: bytes) -> bytes:
    """What unpickles: nothing but the digest tells."""
    assert (4096).to_bytes(2, "little") in data
    return data.replace((4096).to_bytes(2, "little"), (4352).to_bytes(2, "little"))


DAMAGES = {
    "empty": lambda data: b"",
    "cut short": lambda data: data[: len(data) // 2],
    "zeroed": _zeroed,
    "another number": _other_number,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_dropped_with_one_warning(tmp_path, damage):
    cache.store("one", ENTRY)
    cache.store("two", ENTRY)
    for path in tmp_path.glob("*.pickle"):
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.warns(UserWarning, match="damaged") as caught:
        assert cache.load("one") is None and cache.load("two") is None
    assert len(caught) == 1 and str(tmp_path) in str(caught[0].message)
    assert not any(tmp_path.iterdir())
    cache.store("one", ENTRY)
    assert cache.load("one") == ENTRY


def test_a_damaged_report_is_compiled_anew():
    first = estimate(sgd, W, X)
    for path in cache.cache_dir().glob("*.pickle"):
        path.write_bytes(_zeroed(path.read_bytes()))
    with pytest.warns(UserWarning, match="damaged"):
        # another function, so that nothing is remembered in this process
        assert estimate(lambda w, x: sgd(w, x), W, X).peak_bytes == first.peak_bytes


def test_nothing_is_left_of_what_could_not_be_written(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache.os, "replace", full)
    with pytest.warns(UserWarning, match=f"{tmp_path}.*No space left") as caught:
        cache.store("one", ENTRY)
        cache.store("two", ENTRY)
    assert len(caught) == 1 and not any(tmp_path.iterdir())


def test_what_killed_processes_have_left_is_removed(tmp_path):
    left, written = tmp_path / "left.part", tmp_path / "written.part"
    for path in (left, written):
        path.write_bytes(b"half")
    hours_ago = time.time() - 7200
    os.utime(left, (hours_ago, hours_ago))
    cache.store("one", ENTRY)
    assert not left.exists() and written.exists()  # another process writes that one


def test_an_entry_of_a_folder_that_is_only_read_is_taken(tmp_path, monkeypatch):
    cache.store("one", ENTRY)

    def refused(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(cache.os, "utime", refused)
    assert cache.load("one") == ENTRY


def test_a_user_without_a_home_has_a_folder_to_be_told_of(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cache.Path, "home", no_home)
    for name in ("JAXMEM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache.load("one") is None and not cache.cache_dir().exists()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB for temporary files."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def own_pool(monkeypatch, request):
    """Compiles in a folder of their own."""

    def make(folder):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.setattr(pooling, "_POOLS", {})
        request.addfinalizer(pooling.pool().close)

    return make


# no room for the request, or for a part of a dump
@pytest.mark.parametrize("left", some_fast([0, 8192], 0))
def test_a_disk_that_is_full_is_named(small_disk, own_pool, left):
    own_pool(small_disk)
    assert estimate(sgd, W, X, cache=False).peak_bytes > 0
    state, filled = os.statvfs(small_disk), small_disk / "filled"
    filled.write_bytes(bytes(state.f_bavail * state.f_frsize - left))
    with pytest.raises(OSError, match=f"{small_disk}.*No space left.*set TMPDIR"):
        estimate(sgd, W, X, cache=False)
    filled.unlink()
    assert estimate(sgd, W, X, cache=False).peak_bytes > 0


def test_a_folder_that_cannot_be_written_is_named(tmp_path, own_pool, monkeypatch):
    own_pool(tmp_path)
    folder = pooling.pool()._folder
    os.rmdir(folder)
    tmp_path.joinpath(os.path.basename(folder)).write_text("")
    with pytest.raises(OSError, match=f"{folder}.*set TMPDIR"):
        estimate(sgd, W, X, cache=False)


def test_no_folder_for_temporary_files_at_all(monkeypatch):
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/no/such"])
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(OSError, match="/no/such.*set TMPDIR"):
        pooling.Pool()


def test_a_folder_that_was_tidied_up_is_made_anew(tmp_path, own_pool):
    own_pool(tmp_path)
    assert estimate(sgd, W, X, cache=False).peak_bytes > 0
    os.rename(pooling.pool()._folder, tmp_path / "tidied")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert estimate(sgd, W, X, cache=False).peak_bytes > 0
