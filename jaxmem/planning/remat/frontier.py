"""The cheapest sequences for every budget, and the answer for one budget."""

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from jaxmem.planning._graph import Graph
from jaxmem.planning.remat.local_search import EvaluatedSequence
from jaxmem.planning.remat.sequence import SequenceTables, repeats


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

    def columns(self) -> dict[str, tuple]:
        """The fields of a `Frontier` that come from here."""
        costs = tuple(cost for cost, _ in self.prices)
        sequences = tuple(self.sequences)
        return {"peaks": tuple(self.peaks), "costs": costs, "sequences": sequences}

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


@dataclass(frozen=True)
class Rematerialised:
    """A sequence of operations that recomputes some of them.

    Attributes:
      sequence: numbers of operations in the graph.
      peak: bytes, as in `sequence_profile`.
      cost: of the recomputation, in the unit of `cost`; seconds by default.
      recomputed: the repeated operations, in the order of their repeats; an operation
        that runs three times is in it twice.
      lower_bound: bytes; no sequence has a smaller peak.
      optimal: whether it is proven that no sequence within the budget costs less, in
        any order and with any number of repeats.
      optimal_in_order: whether that is proven only of sequences whose first runs follow
        an order that was tried (see `order` of `frontier`), and in which an operation
        is repeated at most once between two first runs, in that order. A cheaper
        sequence of another kind may exist. True wherever `optimal` is.
      seconds: spent planning.
    """

    sequence: tuple[int, ...]
    peak: int
    cost: float
    recomputed: tuple[int, ...]
    lower_bound: int
    optimal: bool
    optimal_in_order: bool
    seconds: float


class OutOfReach(ValueError):
    """No sequence was found within the budget.

    Attributes:
      least: the smallest peak found, in bytes.
      holders: the three largest values at that peak: bytes, and a description.
      proven: whether it is proven that there is none.
    """

    def __init__(
        self,
        budget: float,
        least: int,
        holders: tuple[tuple[int, str], ...],
        proven: bool = False,
    ):
        self.least, self.holders, self.proven = least, holders, proven
        listed = "; ".join(f"{size:,} {what}" for size, what in holders)
        sure = "no sequence stays within" if proven else "none was found within"
        super().__init__(
            f"budget: {sure} {budget:,.0f} bytes; the least peak found is "
            f"{least:,}. Largest there: {listed}"
        )


@dataclass(frozen=True)
class Frontier:
    """The cheapest sequences found, for every budget.

    Attributes:
      graph: the graph.
      peaks: bytes, rising.
      costs: of each peak's sequence, falling; that of the largest peak is 0.
      sequences: of each peak, as numbers of the graph's operations.
      lower_bound: bytes; no sequence has a smaller peak.
      complete: whether the search ended before the time limit.
      seconds: spent planning.
    """

    graph: Graph
    peaks: tuple[int, ...]
    costs: tuple[float, ...]
    sequences: tuple[np.ndarray, ...] = field(repr=False)
    lower_bound: int
    complete: bool
    seconds: float

    def at(self, budget: float) -> Rematerialised:
        """The cheapest sequence within a budget.

        Args:
          budget: bytes.

        Raises:
          OutOfReach: no sequence that was found is within it.
        """
        k = bisect.bisect_right(self.peaks, budget) - 1
        if k < 0:
            raise self.out_of_reach(budget, budget < self.lower_bound)
        sequence = self.sequences[k]
        return Rematerialised(
            sequence=tuple(sequence.tolist()),
            peak=self.peaks[k],
            cost=self.costs[k],
            recomputed=tuple(sequence[repeats(sequence)].tolist()),
            lower_bound=self.lower_bound,
            optimal=self.costs[k] == 0,
            optimal_in_order=self.costs[k] == 0,
            seconds=self.seconds,
        )

    def out_of_reach(self, budget: float, proven: bool) -> OutOfReach:
        """The error for a budget that no sequence is within; whether it is proven."""
        return OutOfReach(budget, self.peaks[0], self._holders(), proven)

    def _holders(self) -> tuple[tuple[int, str], ...]:
        """The largest values at the least peak."""
        events = SequenceTables(self.graph).events(self.sequences[0])
        if not len(events.profile):
            return ()
        peak = int(np.argmax(events.profile))
        # An event is followed by the next read of the same value, until which it lives.
        read_next = (events.value[1:] == events.value[:-1]) & ~events.make[1:]
        until = np.append(np.where(read_next, events.place[1:], -1), -1)
        alive = (events.place == peak) | ((events.place < peak) & (until > peak))
        bytes_of = lambda v: self.graph.values[v].bytes
        values = sorted(set(events.value[alive].tolist()), key=bytes_of, reverse=True)
        return tuple((bytes_of(v), self._described(v)) for v in values[:3])

    def _described(self, value: int) -> str:
        operation = self.graph.operations[self.graph.maker[value]]
        words = (self.graph.values[value].name, "of", operation.name, operation.path)
        return " ".join(w for w in words if w)
