"""How the threads of a GPU get at the bytes of a kernel, beside how many there are."""

from dataclasses import dataclass

SECTOR = 32  # bytes that a GPU fetches at least
LARGE = 2**18  # elements of an array that takes longer than a launch


@dataclass(frozen=True)
class Access:
    """What a fusion's threads do to get at its bytes.

    Attributes:
        blocks: of threads that are started.
        scattered: bytes of sectors of which one element is wanted.
        near: bytes of such sectors whose other elements the block wants soon.
        rows: groups of rows that a block takes one after another.
        columns: blocks that do so.
        loads: of each row.
        stores: whether something is written for each row, before the next is read.
        phases: whether threads wait for one another before they write.
        serial: whether arithmetic waits for loads, as few blocks fit side by side.
        spilled: bytes of values that do not fit in registers.
        apart: bytes that other kernels of the same call move.
    """

    blocks: float = 0.0
    scattered: float = 0.0
    near: float = 0.0
    rows: int = 0
    columns: int = 0
    loads: float = 0.0
    stores: bool = False
    phases: bool = False
    serial: bool = False
    spilled: float = 0.0
    apart: float = 0.0
