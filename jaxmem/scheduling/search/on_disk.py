"""Searches that were made before, on disk, beside what was compiled.

A step is searched once for a target and a budget, whichever process asks first: the
others wait for it, and read what it has found.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from filelock import FileLock, Timeout

from jaxmem.memory.compile import cache
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._rewritten import Rewritten
from jaxmem.scheduling.search.outcome import SearchOutcome

_LOCKS = 2  # digits of the key in a lock's name: few files, few searches that wait


def on_disk(
    key: str,
    rewritten: Callable[[Choice], Rewritten],
    search: Callable[[], SearchOutcome],
    seconds: float | None = None,
) -> SearchOutcome:
    """The outcome of an earlier search, or of this one, which is stored.

    Args:
      key: of `search_key`.
      rewritten: makes the step under a choice.
      search: makes the outcome.
      seconds: how long to wait for another process that searches; None: until it ends.
    """
    if (known := _load(key, rewritten)) is not None:
        return known
    with _alone(key, seconds):
        # another process may have found it meanwhile
        if (known := _load(key, rewritten)) is not None:
            return known
        outcome = search()
        if outcome.is_final:
            cache.store(key, outcome.to_bytes())
    return outcome


def _load(key: str, rewritten: Callable[[Choice], Rewritten]) -> SearchOutcome | None:
    data = cache.load(key)
    if data is None:
        return None
    outcome = SearchOutcome.from_bytes(data, rewritten)
    if outcome is None or outcome.result is None:
        return outcome
    result = outcome.result
    took = f"{result.seconds:.0f} s"
    note = f"found by an earlier search, in {took}; cache=False searches again"
    return replace(outcome, result=replace(result, notes=(*result.notes, note)))


@contextlib.contextmanager
def _alone(key: str, seconds: float | None) -> Iterator[None]:
    """While no other process searches for the same; without a lock after a while."""
    lock = None
    try:
        folder = cache.cache_dir()
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"search-{key[:_LOCKS]}.lock")
        lock.acquire(timeout=-1 if seconds is None else seconds)
    # a folder that cannot be written, a file system without locks: it is only slower
    except (Timeout, OSError, NotImplementedError):
        lock = None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
