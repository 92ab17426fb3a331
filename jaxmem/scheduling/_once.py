"""A value for each key, made once, whichever thread asks first.

The others wait for it. An error that would only be repeated is remembered as well.
"""

import copy
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Slot(Generic[T]):
    lock: threading.RLock = field(default_factory=threading.RLock)
    value: T | None = None
    error: Exception | None = None


class Once(Generic[T]):
    """Values by key; errors of the class `lasting` are remembered."""

    def __init__(self, lasting: type[Exception]):
        self._lasting = lasting
        self._lock = threading.Lock()
        self._slots: dict[Hashable, _Slot[T]] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key, made by `make`, or a copy of a remembered error."""
        # one lock for the table, and one a value: who makes one holds up no other
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
        with slot.lock:
            if slot.error is not None:
                raise copy.copy(slot.error)
            if slot.value is None:
                try:
                    slot.value = make()
                except self._lasting as error:
                    # without its traceback, which would keep the search alive
                    slot.error = copy.copy(error)
                    raise
            return slot.value
