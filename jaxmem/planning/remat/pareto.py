"""The cheapest sequences met so far, by peak."""

import bisect
import math
from collections.abc import Iterator

import numpy as np

from jaxmem.planning.remat.local_search import EvaluatedSequence


class ParetoFront:
    """The cheapest sequences by rising peak; of equal costs the shorter one."""

    def __init__(self):
        self.peaks: list[int] = []  # bytes
        self.prices: list[tuple[float, int]] = []  # (cost, length) of each peak's
        self.sequences: list[np.ndarray] = []  # of each peak

    def __iter__(self) -> Iterator[tuple[int, float, np.ndarray]]:
        """Peak, cost and sequence."""
        costs = (cost for cost, _ in self.prices)
        return zip(self.peaks, costs, self.sequences, strict=True)

    def add(self, state: EvaluatedSequence) -> None:
        self.offer(state.peak, state.cost, state.sequence)

    def offer(self, peak: int, cost: float, sequence: np.ndarray) -> None:
        """Takes a sequence unless one within its peak is as cheap."""
        price = (cost, len(sequence))
        at = bisect.bisect_right(self.peaks, peak)
        if at and self.prices[at - 1] <= price:
            return
        start = stop = bisect.bisect_left(self.peaks, peak)
        while stop < len(self.peaks) and self.prices[stop] >= price:
            stop += 1
        self.peaks[start:stop] = [peak]
        self.prices[start:stop] = [price]
        self.sequences[start:stop] = [sequence]

    def cost(self, target: float) -> float:
        """The cost of the cheapest sequence within the target; infinite if none is."""
        k = bisect.bisect_right(self.peaks, target)
        return self.prices[k - 1][0] if k else math.inf

    def step(self, target: float) -> tuple[float, float]:
        """The largest peak up to which the cheapest within the target is; its cost."""
        k = bisect.bisect_right(self.peaks, target)
        end = self.peaks[k] - 1 if k < len(self.peaks) else target
        return end, self.prices[k - 1][0]

    def within(self, target: float) -> np.ndarray | None:
        """The cheapest sequence within the target."""
        k = bisect.bisect_right(self.peaks, target)
        return self.sequences[k - 1] if k else None

    def above(self, target: float) -> Iterator[np.ndarray]:
        """The sequences with larger peaks than the target, the nearest first."""
        yield from self.sequences[bisect.bisect_right(self.peaks, target) :]
