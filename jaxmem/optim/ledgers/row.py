"""A row of a ledger: one kind of arrays."""

from dataclasses import dataclass

PARTS = ("weights", "gradients", "accumulator", "moments", "masters")


@dataclass(frozen=True)
class LedgerRow:
    """A kind of arrays that a training step keeps.

    Attributes:
      part: one of "weights", "gradients", "accumulator", "moments", "masters".
      name: what it is: the state's class and field, for an optimizer's.
      dtypes: of its arrays, those with the most bytes first.
      device_bytes: on one device.
      host_bytes: in the host's memory, for one device.
    """

    part: str
    name: str
    dtypes: tuple[str, ...]
    device_bytes: int
    host_bytes: int
