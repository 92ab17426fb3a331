"""What has been found out about objects, kept as long as they are looked at.

A search rewrites one step under many choices, which have much in common: all that is
done before what they differ in, and the lists of equations that come of it.
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Remembered:
    """Values by what they are and the very objects that they were made of."""

    def __init__(self):
        self._found: dict[Hashable, tuple[tuple[Any, ...], Any]] = {}

    def get(self, what: Hashable, of: tuple[Any, ...], make: Callable[[], T]) -> T:
        """What `make` gives; the value it gave when it was asked for the first time.

        Args:
          what: tells the values that are made of the same objects.
          of: the objects, told apart by what they are and not by what they equal.
          make: makes the value.
        """
        key = what, tuple(map(id, of))
        if key not in self._found:
            # the objects are kept too: an id is only theirs while they are there
            self._found[key] = of, make()
        return self._found[key][1]

    def forget(self) -> None:
        self._found.clear()
