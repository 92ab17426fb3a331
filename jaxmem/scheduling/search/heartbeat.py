"""Whether a process that others wait for is still there: its heartbeat.

By default jax ends all processes of a job once one of them is gone. With
`jax_enable_recoverability` it does so for process 0 alone, and those that wait for
another one would wait for ever.
"""

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator

from jaxmem.scheduling.search.store import Store

_EVERY = 5.0  # seconds from one beat to the next
# Seconds without one: more than the 100 after which jax itself ends the others. Its
# beats come from a thread of C++; this thread's wait for whoever holds the GIL.
SILENCE = 120.0


@contextlib.contextmanager
def beating(folder: str, store: Store) -> Iterator[None]:
    """Sets a new value under `folder` every few seconds, from a thread."""
    over = threading.Event()
    thread = threading.Thread(target=_beat, args=(folder, store, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_EVERY)


def _beat(folder: str, store: Store, over: threading.Event) -> None:
    who = f"{socket.gethostname()}, pid {os.getpid()}"
    for n in itertools.count():
        try:
            store.set(f"{folder}/beat", f"{n} {who}".encode())
        except RuntimeError:  # of jax: the job is over
            return
        if over.wait(_EVERY):
            return


class Listener:
    """Hears the beats under `folder`."""

    def __init__(self, folder: str, store: Store):
        self._folder, self._store = folder, store
        self._last, self._since = b"", time.monotonic()

    def is_silent(self) -> bool:
        """Whether there were beats, and none for too long."""
        beat = self._store.under(f"{self._folder}/").get(f"{self._folder}/beat", b"")
        if beat != self._last:
            self._last, self._since = beat, time.monotonic()
        return self._last != b"" and time.monotonic() - self._since > SILENCE

    @property
    def who(self) -> str:
        """The host and the pid of the process that was heard."""
        return self._last.decode().split(" ", 1)[-1]
