"""Reads the buffer assignment and the live ranges XLA dumps as text.

The two together are the compiler's own map of memory: which value lies where in which
allocation, and from which step of the schedule to which it is alive.
"""

import re
from collections import Counter
from dataclasses import dataclass, field

_ALLOCATION = re.compile(r"allocation (\d+): size (\d+)(.*)")
_VALUE = re.compile(
    r"\s*value: <\d+ ([^\s{]+)(?:\{([\d,]*)\})?(?: \(phi\))? @(\d+)>"
    r" \(size=(\d+),offset=(\d+)\): (.*)"
)
_RANGE = re.compile(r"\s+([^\s{]+)\{([\d,]*)\}:(\d+)-(\d+)$")
_STEP = re.compile(r"\s+(\d+):(\S+)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=\s]*)\]")

_KINDS = ("argument", "output", "alias", "temp", "generated_code")
_TOTAL = re.compile(r"\(color=(\d+)\)\s+Total bytes: (\d+)")

Key = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Value:
    """One HLO value and the bytes of its allocation it lies in."""

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
    values: list[Value] = field(default_factory=list)


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
            if allocations and (found := _VALUE.match(line)):
                name, index, _, size, offset, shape = found.groups()
                value = Value(name, _index(index), int(size), int(offset), shape)
                allocations[-1].values.append(value)
        elif line.startswith("allocation "):
            allocations.append(_allocation(line))
        elif allocations and not line.startswith(" "):
            break
    return allocations


def assigned_bytes(assignment: str, usage: str) -> dict[str, int] | None:
    """Bytes of a compiled step by kind, as the compiler counts them at the end.

    Args:
      assignment: the text of a `*buffer-assignment.txt`.
      usage: that of the `*memory-usage-report.txt`, which XLA writes after it.

    Returns:
      Bytes in the memory of one device by `argument`, `output`, `alias`, `temp` and
      `generated_code` (0: there is none yet); None where the two texts do not agree.
    """
    sizes: dict[str, int] = dict.fromkeys(_KINDS, 0)
    by_color: Counter[int] = Counter()
    for line in assignment.splitlines():
        if not line.startswith("allocation "):
            continue
        found = _allocation(line)
        by_color[found.color] += found.size
        if found.color == 0:
            is_argument = found.kind == "parameter"
            is_temp = "preallocated-temp" in line
            sizes["argument"] += found.size * is_argument
            sizes["output"] += found.size * found.live_out
            sizes["alias"] += found.size * (is_argument and found.live_out)
            sizes["temp"] += found.size * is_temp
    totals = {int(color): int(size) for color, size in _TOTAL.findall(usage)}
    return sizes if totals and +by_color == Counter(totals) else None


def parse_live_range(text: str) -> LiveRanges:
    """The schedule and live ranges of a `*live-range.txt`."""
    sequence: list[str] = []
    ranges: dict[Key, tuple[int, int]] = {}
    for line in text.splitlines():
        if line.lstrip().startswith("Live ranges at"):
            break
        if found := _RANGE.match(line):
            name, index, start, end = found.groups()
            ranges[name, _index(index)] = int(start), int(end)
        elif found := _STEP.match(line):
            sequence.append(found.group(2))
    return LiveRanges(tuple(sequence), ranges)


def array_shape(text: str) -> tuple[str, tuple[int, ...]] | None:
    """`f32[24,8]{1,0:T(8,128)}` as ("f32", (24, 8)); None for a tuple or token."""
    found = _ARRAY.match(text)
    if not found:
        return None
    sizes = re.findall(r"\d+", found.group(2))
    return found.group(1), tuple(int(n) for n in sizes)


def _allocation(line: str) -> Allocation:
    found = _ALLOCATION.match(line)
    if found is None:
        raise ValueError(f"not an allocation: {line[:80]!r}")
    number, size, rest = found.groups()
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
        kind=next((kind for kind, found in kinds.items() if found), "temp"),
        parameter=int(parameter.group(1)) if parameter else None,
        live_out=live_out,
        color=int(color.group(1)) if color else 0,
    )


def _index(text: str | None) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",")) if text else ()
