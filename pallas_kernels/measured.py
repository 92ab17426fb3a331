"""What a device has shown: the passes in which a kernel is no slower than XLA.

`measured.json` beside this file is generated (`python -m benchmarks.device --table`)
from the results of devices, and is not edited by hand.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from pallas_kernels import chips

# With the same multiprocessors as a chip that was measured, and less bandwidth, of
# which XLA needs more: what a kernel gains there it gains here.
ALIKE = {"h200": ("h100", "gh200")}
PATH = pathlib.Path(__file__).with_name("measured.json")


class Measured(NamedTuple):
    """A pass of a kernel that was measured to be no slower than XLA on a device.

    Attributes:
      kernel: its name in calls of `dispatch`.
      chip: a name of `chips`, such as "h100" or "v5e".
      dtype: of the array that the pass is sized by, such as "bfloat16".
      smallest: the number of elements from which on the kernel is no slower.
      backward: whether this is the backward pass.
    """

    kernel: str
    chip: str
    dtype: str
    smallest: int
    backward: bool


_TYPES = {"kernel": str, "chip": str, "dtype": str, "smallest": int, "backward": bool}


def load(path: pathlib.Path = PATH) -> tuple[Measured, ...]:
    """The entries of a file; ValueError names the one that is none."""
    try:
        rows = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name}: no JSON: {error}") from error
    if not isinstance(rows, list):
        raise ValueError(f"{path.name}: a list of entries is wanted")
    found = [_entry(f"{path.name}, entry {n}", row) for n, row in enumerate(rows)]
    told = {(entry.chip, entry.kernel, entry.dtype) for entry in found}
    alike = [
        entry._replace(chip=chip)
        for entry in found
        for chip in ALIKE.get(entry.chip, ())
        if (chip, entry.kernel, entry.dtype) not in told
    ]
    return tuple(found + alike)


def _entry(where: str, row: Any) -> Measured:
    if not isinstance(row, Mapping) or set(row) != set(_TYPES):
        raise ValueError(f"{where}: an object of {', '.join(_TYPES)} is wanted: {row}")
    for name, kind in _TYPES.items():
        if type(row[name]) is not kind:
            raise ValueError(f"{where}: {name}={row[name]!r} is no {kind.__name__}")
    if row["chip"] not in (*chips.GPUS, *chips.TPUS):
        raise ValueError(f"{where}: chip={row['chip']!r} is none that is known")
    if row["smallest"] < 0:
        raise ValueError(f"{where}: smallest={row['smallest']} is negative")
    return Measured(**row)
