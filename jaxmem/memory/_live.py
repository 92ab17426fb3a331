"""Which bytes of the temporaries hold what at each step of the compiled schedule.

A value lies at a fixed place in its allocation and is alive over an interval of the
flattened schedule, the bodies of loops included. Values share places: a loop's result
lies where its carry lay. So live bytes at a step are the size of the *union* of the
live places; adding up the values, as XLA's own listing does, counts many twice.
"""

from dataclasses import dataclass

import numpy as np

from jaxmem.memory._dump import Allocation, LiveRanges, Value

# Steps whose exact live bytes are looked at for the peak: the bound that orders them
# is exact but where places partly overlap, so the first few decide.
_CANDIDATES = 256


@dataclass(frozen=True)
class Held:
    """A value alive at a step, with the bytes that are its own."""

    value: Value
    bytes: int


class LiveMap:
    """Live bytes of one set of values over the schedule."""

    def __init__(self, values: list[Value], live: LiveRanges):
        self.values = [v for v in values if v.key in live.ranges and v.size]
        ranges = [live.ranges[v.key] for v in self.values]
        self.starts = np.array([start for start, _ in ranges], np.int64)
        self.ends = np.array([end for _, end in ranges], np.int64)
        self.steps = max(len(live.sequence), 1)

    def bounds(self) -> np.ndarray:
        """Upper bounds of the live bytes: places that partly overlap count in full."""
        places: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for value, start, end in zip(self.values, self.starts, self.ends, strict=True):
            span = int(start), int(end)
            places.setdefault((value.offset, value.size), []).append(span)
        change = np.zeros(self.steps + 2, np.int64)
        for (_, size), spans in places.items():
            for start, end in _merged(spans):
                change[min(start, self.steps)] += size
                change[min(end, self.steps) + 1] -= size
        return np.cumsum(change)[: self.steps]

    def held(self, step: int) -> list[Held]:
        """Who holds which bytes at a step; no byte is counted twice."""
        alive = np.nonzero((self.starts <= step) & (self.ends >= step))[0]
        # In one place the youngest value is what lies there.
        order = sorted(
            alive,
            key=lambda i: (
                self.values[i].offset,
                -self.values[i].size,
                -self.starts[i],
            ),
        )
        held, covered = [], 0
        for i in order:
            value = self.values[i]
            end = value.offset + value.size
            if (own := end - max(value.offset, covered)) > 0:
                held.append(Held(value, own))
                covered = end
        return held

    def bytes_at(self, step: int) -> int:
        """Live bytes at a step."""
        return sum(h.bytes for h in self.held(step))

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


def temporaries(allocations: list[Allocation], temp_bytes: int) -> list[Value]:
    """The values of the temporaries that the compiler's `temp_bytes` counts.

    Allocations are laid end to end, so that one address names one byte. Those beside
    the main memory count where they fit: a TPU's vector memory does not.
    """
    found, base = [], 0
    temporary = (a for a in allocations if a.kind == "temp")
    for allocation in sorted(temporary, key=lambda a: a.color):
        if allocation.color == 0 or base + allocation.size <= temp_bytes:
            found += [_moved(v, base) for v in allocation.values if _is_data(v)]
            base += allocation.size
    return found


def _is_data(value: Value) -> bool:
    """Not a tuple's table of addresses: a few bytes, and on TPU none in memory."""
    return not value.shape.startswith("(")


def _moved(value: Value, base: int) -> Value:
    if base == 0:
        return value
    return Value(value.name, value.index, value.size, value.offset + base, value.shape)


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins intervals of steps that touch or overlap."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged
