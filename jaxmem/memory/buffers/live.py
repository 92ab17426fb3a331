"""Which values are in the temporaries at each step of the compiled schedule.

Values share places: the result of a loop has the place of its carry. So the live bytes
at a step are the size of the union of the live places. The sum over the values, as
XLA's own listing shows it, counts many bytes twice.
"""

from dataclasses import dataclass, replace

import numpy as np

from jaxmem.memory.buffers.assignment import Allocation, BufferValue, LiveRanges

# Steps whose exact live bytes are counted to find the peak. They are ordered by a bound
# that is exact except where places overlap in part, so the first few decide.
_CANDIDATES = 256


@dataclass(frozen=True)
class LiveValue:
    """A value alive at a step, and its bytes that no other live value covers."""

    value: BufferValue
    bytes: int


class LiveMap:
    """Live bytes of one set of values over the schedule."""

    def __init__(self, values: list[BufferValue], live: LiveRanges):
        self.values = [v for v in values if v.key in live.ranges and v.size]
        ranges = [live.ranges[v.key] for v in self.values]
        self.starts = np.array([start for start, _ in ranges], np.int64)
        self.ends = np.array([end for _, end in ranges], np.int64)
        self.steps = max(len(live.sequence), 1)

    def bounds(self) -> np.ndarray:
        """Upper bounds of the live bytes: places that overlap in part count in full."""
        places: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for value, start, end in zip(self.values, self.starts, self.ends, strict=True):
            span = int(start), int(end)
            places.setdefault((value.offset, value.size), []).append(span)
        change = np.zeros(self.steps + 2, np.int64)
        for (_, size), spans in places.items():
            for start, end in merged_spans(spans):
                change[min(start, self.steps)] += size
                change[min(end, self.steps) + 1] -= size
        return np.cumsum(change)[: self.steps]

    def values_at(self, step: int) -> list[LiveValue]:
        """The values alive at a step; no byte is counted twice."""
        alive = np.nonzero((self.starts <= step) & (self.ends >= step))[0]
        # Of the values of one place the youngest one is there.
        order = sorted(
            alive,
            key=lambda i: (
                self.values[i].offset,
                -self.values[i].size,
                -self.starts[i],
            ),
        )
        live, covered = [], 0
        for i in order:
            value = self.values[i]
            end = value.offset + value.size
            if (uncovered := end - max(value.offset, covered)) > 0:
                live.append(LiveValue(value, uncovered))
                covered = end
        return live

    def bytes_at(self, step: int) -> int:
        """Live bytes at a step."""
        return sum(v.bytes for v in self.values_at(step))

    def peak_step(self) -> int:
        """The first step at which most bytes are alive."""
        bounds = self.bounds()
        best, best_step = -1, 0
        for step in np.argsort(-bounds, kind="stable")[:_CANDIDATES]:
            if bounds[step] <= best:
                break
            if (here := self.bytes_at(int(step))) > best:
                best, best_step = here, int(step)
        return best_step

    def samples(self, count: int) -> list[int]:
        """At most about `count` steps: the fullest of each stretch, and the peak."""
        bounds = self.bounds()
        edges = np.linspace(0, self.steps, min(count, self.steps) + 1).astype(int)
        fullest = {
            int(a + np.argmax(bounds[a:b]))
            for a, b in zip(edges[:-1], edges[1:], strict=True)
            if b > a
        }
        return sorted(fullest | {self.peak_step()})


def temporaries(allocations: list[Allocation], temp_bytes: int) -> list[BufferValue]:
    """The values of the temporaries that the compiler's `temp_bytes` counts."""
    # Allocations are put end to end, so that one address is one byte. Those in other
    # memories (colors) count as long as `temp_bytes` has room for them: those in a
    # TPU's vector memory are not part of it.
    values, base = [], 0
    temporary = (a for a in allocations if a.kind == "temp")
    for allocation in sorted(temporary, key=lambda a: a.color):
        if allocation.color == 0 or base + allocation.size <= temp_bytes:
            # A tuple's table of addresses is a few bytes, and on TPU not in memory.
            data = (v for v in allocation.values if not v.shape.startswith("("))
            values += [replace(v, offset=v.offset + base) for v in data]
            base += allocation.size
    return values


def merged_spans(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins intervals of steps that touch or overlap."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged
