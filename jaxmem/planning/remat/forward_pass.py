"""The forward pass of a training step: where it ends, and where it may be cut."""

from collections.abc import Sequence

import numpy as np

from jaxmem.planning.remat.sequence import SequenceEvents, SequenceTables


class ForwardPass:
    """Where the forward pass ends, and when its values are read."""

    def __init__(self, tables: SequenceTables, plain: SequenceEvents):
        self.tables, self.profile = tables, plain.profile
        self.count = len(tables.makes)  # the number of operations
        readers, maker = tables.graph.readers, tables.maker
        values = [v for makes in tables.makes for v in makes]
        # Value -> its last reader, or its maker if it has none.
        self.last = {v: max(readers[v], default=int(maker[v])) for v in values}
        # Outputs and values whose maker must not be repeated are never dropped.
        self.permanent = tables.held_set | {
            v for v in values if not tables.recomputable[maker[v]]
        }
        self.end = self._forward_end(values)  # the first operation after the pass
        forward = [v for v in values if maker[v] < self.end]
        firsts = {v: [r for r in readers[v] if r >= self.end] for v in forward}
        # Value of the forward pass -> the first operation after the pass that reads it.
        self.backward_reader = {v: later[0] for v, later in firsts.items() if later}
        # Value of the forward pass -> its last reader in the pass.
        self.last_forward = {
            v: max((r for r in readers[v] if r < self.end), default=int(maker[v]))
            for v in forward
        }

    def _forward_end(self, values: Sequence[int]) -> int:
        """The place at which most bytes wait that may be recomputed."""
        some = [v for v in values if v not in self.permanent]
        made = self.tables.maker[some] + 1
        waiting = self.sums(some, made, [self.last[v] + 1 for v in some])
        return int(np.argmax(waiting[: self.count]))

    def sums(self, values: Sequence[int], start, stop) -> np.ndarray:
        """(count + 2,) bytes of the values, each alive from `start` up to `stop`."""
        size, change = self.tables.size[list(values)], np.zeros(self.count + 3)
        np.add.at(change, np.asarray(start, np.int64), size)
        np.subtract.at(change, np.asarray(stop, np.int64), size)
        return np.cumsum(change)[:-1]

    def cuts(self, parts: int) -> list[int]:
        """First operations of about `parts` blocks that hold equal bytes."""
        # A pass with no more operations than that has one block for each.
        if self.end <= parts:
            return list(range(self.end))
        made = np.zeros(self.end + 1)
        for v in self.backward_reader:
            made[int(self.tables.maker[v]) + 1] += self.tables.size[v]
        most = made.sum() / parts
        # A single large value is not worth a block of its own.
        held = np.cumsum(np.minimum(made, most / 2))
        some = list(self.last_forward)
        ends = [self.last_forward[v] + 1 for v in some]
        crossing = self.sums(some, self.tables.maker[some] + 1, ends)
        return _cuts(crossing[: self.end + 1], held, most)


def _cuts(crossing: np.ndarray, held: np.ndarray, most: float) -> list[int]:
    """The cuts with the fewest crossing bytes in total, by dynamic programming."""
    count = len(crossing)
    first = np.searchsorted(held, held - most)
    total, before = np.zeros(count), np.zeros(count, np.int64)
    for at in range(1, count):
        start = min(int(first[at]), at - 1)
        before[at] = start + int(np.argmin(total[start:at]))
        total[at] = total[before[at]] + crossing[at]
    cuts = [int(before[count - 1])]
    while cuts[-1]:
        cuts.append(int(before[cuts[-1]]))
    return cuts[::-1]
