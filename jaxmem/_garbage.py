"""Garbage collection, put off while millions of objects are made that stay.

Python looks for garbage as often as so many objects have been made. A step that is
traced and rewritten is made of few others, nearly all of them alive: a third of the
time of a search went into looking through them.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Objects that are made before Python looks for garbage: those of a large step, in a few
# hundred MiB.
_OBJECTS = 2_000_000

_lock = threading.Lock()
_depth = 0  # of contexts, in all threads
_before: tuple[int, ...] = ()  # the thresholds outside of all


@contextmanager
def seldom_collected() -> Iterator[None]:
    """A context, or a decorator, in which Python seldom looks for garbage."""
    global _depth, _before
    with _lock:
        if not _depth:
            _before = gc.get_threshold()
            if 0 < _before[0] < _OBJECTS:  # 0: never
                gc.set_threshold(_OBJECTS, *_before[1:])
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if not _depth:
                gc.set_threshold(*_before)
