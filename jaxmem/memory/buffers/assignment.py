"""Reads the buffer assignment and the live ranges that XLA dumps as text."""

import re
from collections import Counter
from dataclasses import dataclass, field

from jaxmem.memory.buffers.shapes import integers

_ALLOCATION = re.compile(r"allocation (\d+): size (\d+)(.*)")
_VALUE = re.compile(
    r"\s*value: <\d+ ([^\s{]+)(?:\{([\d,]*)\})?(?: \(phi\))? @(\d+)>"
    r" \(size=(\d+),offset=(\d+)\): (.*)"
)
_RANGE = re.compile(r"\s+([^\s{]+)\{([\d,]*)\}:(\d+)-(\d+)$")
_STEP = re.compile(r"\s+(\d+):(\S+)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=\s]*)\]")

_KINDS = ("argument", "output", "alias", "temp", "generated_code")
HOST = 5  # XLA's number of the host's memory
_TOTAL = re.compile(r"\(color=(\d+)\)\s+Total bytes: (\d+)")

Key = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class BufferValue:
    """One HLO value, and its place in an allocation."""

    name: str
    index: tuple[int, ...]
    size: int
    offset: int
    shape: str

    @property
    def key(self) -> Key:
        return self.name, self.index


@dataclass(frozen=True)
class Allocation:
    """One block of memory: a parameter, an output, a constant or temporaries."""

    number: int
    size: int
    kind: str
    parameter: int | None
    live_out: bool
    color: int
    values: list[BufferValue] = field(default_factory=list)


@dataclass(frozen=True)
class LiveRanges:
    """The flattened schedule, and when each value is alive (both ends included)."""

    sequence: tuple[str, ...]
    ranges: dict[Key, tuple[int, int]]


def parse_buffer_assignment(text: str) -> list[Allocation]:
    """All allocations of a `*buffer-assignment.txt`, in order."""
    allocations: list[Allocation] = []
    for line in text.splitlines():
        if line.startswith(" value:"):
            if allocations and (match := _VALUE.match(line)):
                name, index, _, size, offset, shape = match.groups()
                place = integers(index or "")
                value = BufferValue(name, place, int(size), int(offset), shape)
                allocations[-1].values.append(value)
        elif line.startswith("allocation "):
            allocations.append(_allocation(line))
        elif allocations and not line.startswith(" "):
            break
    return allocations


def assigned_bytes(assignment: str, usage: str) -> dict[str, int] | None:
    """Bytes on one device by kind; None where the two texts do not agree."""
    # The compiler's count at the end of `generated_code` is 0: there is none yet.
    host = [f"host_{kind}" for kind in _KINDS[:-1]]
    sizes: dict[str, int] = dict.fromkeys([*_KINDS, *host], 0)
    by_color: Counter[int] = Counter()
    for line in assignment.splitlines():
        if not line.startswith("allocation "):
            continue
        block = _allocation(line)
        by_color[block.color] += block.size
        if block.color in (0, HOST):  # others are other memories of the device
            where = "host_" if block.color == HOST else ""
            is_argument = block.kind == "parameter"
            is_temp = "preallocated-temp" in line
            sizes[f"{where}argument"] += block.size * is_argument
            sizes[f"{where}output"] += block.size * block.live_out
            sizes[f"{where}alias"] += block.size * (is_argument and block.live_out)
            sizes[f"{where}temp"] += block.size * is_temp
    totals = {int(color): int(size) for color, size in _TOTAL.findall(usage)}
    return sizes if totals and +by_color == Counter(totals) else None


def parse_live_range(text: str) -> LiveRanges:
    """The schedule and live ranges of a `*live-range.txt`."""
    sequence: list[str] = []
    ranges: dict[Key, tuple[int, int]] = {}
    for line in text.splitlines():
        if line.lstrip().startswith("Live ranges at"):
            break
        if match := _RANGE.match(line):
            name, index, start, end = match.groups()
            ranges[name, integers(index or "")] = int(start), int(end)
        elif match := _STEP.match(line):
            sequence.append(match.group(2))
    return LiveRanges(tuple(sequence), ranges)


def array_shape(text: str) -> tuple[str, tuple[int, ...]] | None:
    """`f32[24,8]{1,0:T(8,128)}` as ("f32", (24, 8)); None for a tuple or token."""
    match = _ARRAY.match(text)
    if not match:
        return None
    sizes = re.findall(r"\d+", match.group(2))
    return match.group(1), tuple(int(n) for n in sizes)


def _allocation(line: str) -> Allocation:
    match = _ALLOCATION.match(line)
    if match is None:
        raise ValueError(f"not an allocation: {line[:80]!r}")
    number, size, rest = match.groups()
    parameter = re.search(r"parameter (\d+)", rest)
    color = re.search(r"color (\d+)", rest)
    live_out = "maybe-live-out" in rest
    kinds = {
        "parameter": parameter,
        "temp": "preallocated-temp" in rest,
        "constant": "constant" in rest,
        "thread-local": "thread-local" in rest,
        "output": live_out,
    }
    return Allocation(
        number=int(number),
        size=int(size),
        kind=next((kind for kind, applies in kinds.items() if applies), "temp"),
        parameter=int(parameter.group(1)) if parameter else None,
        live_out=live_out,
        color=int(color.group(1)) if color else 0,
    )
