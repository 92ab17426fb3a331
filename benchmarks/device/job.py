"""A job: one question to a device, answered in rows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Rows = Iterator[dict[str, Any]]
LIMIT = 540  # seconds: what a device is lent for is often counted in tens of minutes
GIB = 2**30


class NotHere(Exception):
    """A job that this machine cannot do: a program or a library is missing."""


@dataclass(frozen=True)
class Job:
    """One question to a device.

    Attributes:
      name: its piece, a colon, and what it asks, as "right: rms_norm".
      rows: from whether it is in small to what is found, a row at a time.
      seconds: that it takes on a device, roughly.
      value: beside others', for the order: value a second decides.
      limit: seconds after which it is ended.
      under: a program and its options that the process runs under.
      memory: bytes that the process may take of the device; None: all.
      small: whether it is in small on a device too.
      kernel: that it is about, as `pallas_kernels.dispatch` names it.
      dtype: the one that it times the kernel in.
    """

    name: str
    rows: Callable[[bool], Rows]
    seconds: int = 60
    value: float = 1.0
    limit: float = LIMIT
    under: tuple[str, ...] = ()
    memory: int | None = None
    small: bool = False
    kernel: str = ""
    dtype: str = ""

    @property
    def piece(self) -> str:
        return self.name.partition(":")[0]

    @property
    def worth(self) -> float:
        """For the order: the largest first."""
        return self.value / self.seconds
