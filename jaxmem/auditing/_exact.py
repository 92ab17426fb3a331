"""Small arrays that each device computes from its own number, by their very values.

XLA looks up in tables where a device's part begins. Two devices may find the same
there, so that they are not told apart by their numbers alone.
"""

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxmem.auditing import _axes
from jaxmem.memory.buffers import Instruction
from jaxmem.memory.buffers.device_groups import Labels, labels_of
from jaxmem.memory.buffers.shapes import arrays_of

_MOST = 4096  # elements of one array on one device
_DIRECTION = re.compile(r"direction=(\w\w)")
_WORDS = {"true": 1, "false": 0}
_SAME = frozenset("bitcast reshape copy convert".split())
_COMPARE = {"EQ": "eq", "NE": "ne", "LT": "lt", "LE": "le", "GT": "gt", "GE": "ge"}
_DO: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "negate": np.negative,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "select": np.where,
    "clamp": lambda low, x, high: np.minimum(np.maximum(low, x), high),
    "shift-right-logical": np.right_shift,
    "shift-left": np.left_shift,
    # towards zero, as XLA rounds
    "divide": lambda x, y: (x / y) if x.dtype.kind == "f" else np.trunc(x / y),
    "remainder": np.fmod,
}


class Exact:
    """An array on each device; the first axis is that of the devices."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exact) and np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return hash(self.array.tobytes())

    @property
    def labels(self) -> Labels:
        """Devices with one label have the same values."""
        rows = self.array.reshape(len(self.array), -1)
        return labels_of([row.tobytes() for row in rows])


def numbers_of_devices(devices: int) -> Exact:
    """What `partition-id` is."""
    return Exact(np.arange(devices))


def exact(
    made: Instruction, operands: Sequence[Exact | None], devices: int
) -> Exact | None:
    """What an instruction computes on each device; None where that is not followed."""
    arrays = arrays_of(made.shape)
    if made.shape.startswith("(") or not arrays or arrays[0].elements > _MOST:
        return None
    if not re.match(r"[su]\d+$|pred$|b?f\d+$", arrays[0].dtype):
        return None
    sizes = (devices, *arrays[0].sizes)
    if made.opcode == "constant":
        return _constant(made, sizes)
    known = [one.array for one in operands if one is not None]
    if not known or len(known) < len(operands):
        return None
    with np.errstate(all="ignore"):
        found = _computed(made, known, sizes)
    if found is None or found.shape != sizes:
        return None
    return Exact(_wrapped(found, arrays[0].dtype))


def _constant(made: Instruction, sizes: tuple[int, ...]) -> Exact | None:
    text = made.argument
    words = re.findall(r"[^\s{},]+", text)
    if "..." in text or len(words) != int(np.prod(sizes[1:])):
        return None
    try:
        values = [_WORDS[n] if n in _WORDS else _number(n) for n in words]
    except ValueError:
        return None
    if any(abs(value) >= 2**62 for value in values):
        return None
    return Exact(np.broadcast_to(np.array(values).reshape(sizes[1:]), sizes))


def _number(text: str) -> int | float:
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


def _computed(made: Instruction, known: list[np.ndarray], sizes) -> np.ndarray | None:
    kind = made.opcode
    if kind in _SAME:
        return known[0].reshape(sizes) if known[0].size == np.prod(sizes) else None
    if kind == "compare" and (found := _DIRECTION.search(made.attributes)):
        return getattr(operator, _COMPARE[found[1]])(known[0], known[1])
    if kind == "broadcast":
        return _broadcast(made, known[0], sizes)
    if kind == "slice":
        cuts = (slice(*cut) for cut in _axes.limits(made))
        return known[0][(slice(None), *cuts)]
    if kind == "dynamic-slice":
        return _slice(known, sizes)
    return _DO[kind](*known) if kind in _DO else None


def _broadcast(made: Instruction, array: np.ndarray, sizes) -> np.ndarray:
    axes = [axis + 1 for axis in made.listed("dimensions")]
    wide = [sizes[axis] if axis in (0, *axes) else 1 for axis in range(len(sizes))]
    return np.broadcast_to(array.reshape(wide), sizes)


def _slice(known: list[np.ndarray], sizes) -> np.ndarray:
    array, *starts = known
    rows = []
    for device, row in enumerate(array):
        cuts = []
        for axis, size in enumerate(sizes[1:]):
            start = int(starts[axis].reshape(len(array), -1)[device, 0])
            start = min(max(0, start), row.shape[axis] - size)
            cuts.append(slice(start, start + size))
        rows.append(row[tuple(cuts)])
    return np.stack(rows)


def _wrapped(array: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers as a type of so many bits holds them; floats in 64 bits."""
    if dtype[0] in "bf":
        return array.astype(np.float64)
    if dtype == "pred":
        return (array != 0).astype(np.int64)
    bits = min(int(dtype[1:]), 62)
    array = array.astype(np.int64)
    if dtype[0] == "u":
        return array & (2**bits - 1)
    half = 2 ** (bits - 1)
    return (array + half) % (2 * half) - half if bits < 62 else array
