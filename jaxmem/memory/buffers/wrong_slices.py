"""Slices of the host's arrays that a GPU takes from another place than is meant.

XLA:GPU copies a slice in a loop along a line, `dynamic_slice_config`, whose start and
step it has worked out of the index; when the copy runs, nobody looks at the index. In
old versions they are wrong (see ir/host_slices.py), in silence: a backward scan
is given the host's layers in the order of the forward scan. So the line is held against
the index that the program computes, iteration by iteration. (XLA's line is the offset
in the first iteration and what each iteration adds, whatever the counter starts from;
openxla/xla, dynamic_slice_analysis.cc.) An index that cannot be followed says nothing,
but in those versions: there XLA's line may be wrong, and nothing shows that it is not.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxmem.ir.host_slices import AFFECTED
from jaxmem.memory.buffers.assignment import HOST
from jaxmem.memory.buffers.hlo import Hlo, Instruction
from jaxmem.memory.buffers.integers import Integers
from jaxmem.memory.buffers.shapes import integers
from jaxmem.memory.buffers.trips import loops_around, trips

_MARK = '"dynamic_slice_config":'
# jax 0.12 writes the line inside, of one kind among others
_LINE = re.compile(_MARK + r'\{(?:[^{}]*"linear":\{)?([^{}]*)\}')
_NUMBER = re.compile(r'"(byte_\w+)":"?(-?\d+)')
_SHAPE = re.compile(r"[a-z]+(\d*)[a-z\d]*\[([\d,]*)\](?:\{([\d,]*))?")
_ON_HOST = f"S({HOST})"


@dataclass(frozen=True)
class WrongSlice:
    """A slice of a host's array, which a GPU takes from another place than is meant.

    Attributes:
        operation: the name scopes and the operation it was made for.
        source: where that is written, as `file:line (function)`; empty where unknown.
        written: whether the slice is written; else it is read.
        iteration: of the loop, the first with another place, counted from 0.
        offset: in bytes from the start of the array, where it is taken from.
        wanted: where the index says; None where the text does not tell, in a version
            whose line cannot be trusted.
        instruction: the compiler's name of the copy.
    """

    operation: str
    source: str
    written: bool
    iteration: int
    offset: int
    wanted: int | None
    instruction: str = ""

    @property
    def told(self) -> str:
        """What is wrong, as a finding has it."""
        done = "written" if self.written else "read"
        meant = "another" if self.wanted is None else f"{self.wanted:,}"
        return (
            f"a slice of the host's memory is {done} at byte {self.offset:,}, where "
            f"its index says {meant}, in iteration {self.iteration}"
        )


class _Array(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # of each axis, bits from one element to the next


def wrong_slices(hlo: Hlo) -> tuple[WrongSlice, ...]:
    """Those of a compiled module; soon done where nothing is in the host's memory."""
    names = [name for name, (_, rest) in hlo.lines.items() if _MARK in rest]
    made = (hlo.instruction(name) for name in names)
    found = (_wrong(hlo, one) for one in made if one is not None)
    return tuple(one for one in found if one is not None)


def _wrong(hlo: Hlo, made: Instruction) -> WrongSlice | None:
    line, operand = _LINE.search(made.attributes), hlo.instruction(made.operands[0])
    if line is None or operand is None or _ON_HOST not in operand.shape:
        return None
    numbers = {key: int(value) for key, value in _NUMBER.findall(line.group(1))}
    start, step = (numbers.get(f"byte_{key}", 0) for key in ("offset", "stride"))
    array, written = _array(operand.shape), made.opcode == "dynamic-update-slice"
    index = made.operands[2 if written else 1 :]
    loop = next(loops_around(hlo, made), None)
    integers = Integers(hlo, loop)
    sizes = _sizes(hlo, made)
    ends = [n - size for n, size in zip(array.shape, sizes, strict=True)]
    last = _offset(ends, ends, array)
    for k in range(1 if loop is None else trips(hlo, loop)):
        offset = min(max(0, start + k * step), last)
        pairs = zip(index, ends, strict=True)
        at = [integers.at(i, k) if end else 0 for i, end in pairs]
        known = [i for i in at if i is not None]
        wanted = _offset(known, ends, array) if len(known) == len(at) else None
        if wanted is None and not AFFECTED:
            continue
        if offset != wanted:
            operation = made.metadata.get("op_name", "")
            where = operation, hlo.source(made), written
            return WrongSlice(*where, k, offset, wanted, made.name)
    return None


def _array(text: str) -> _Array:
    """The array of a shape such as `f32[8,256]{1,0:S(5)}`."""
    found = _SHAPE.match(text)
    assert found is not None, text
    bits, sizes, order = found.groups()
    shape = integers(sizes)
    strides, step = [0] * len(shape), int(bits or 8)
    for axis in integers(order or ""):
        strides[axis] = step
        step *= shape[axis]
    return _Array(shape, tuple(strides))


def _sizes(hlo: Hlo, made: Instruction) -> tuple[int, ...]:
    """Of the slice that an instruction takes."""
    if made.opcode == "dynamic-update-slice":
        update = hlo.instruction(made.operands[1])
        assert update is not None
        return _array(update.shape).shape
    return made.listed("dynamic_slice_sizes")


def _offset(at: Sequence[int], ends: Sequence[int], array: _Array) -> int:
    """In bytes; XLA keeps a slice inside of the array."""
    inside = (min(max(0, i), end) for i, end in zip(at, ends, strict=True))
    return sum(i * n for i, n in zip(inside, array.strides, strict=True)) // 8
