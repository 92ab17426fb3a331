"""What is alive while the equations of a region run, whole and in parts."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jaxmem.ir.graph import JaxprGraph
from jaxmem.scheduling.tiling.regions import Region, inner


@dataclass(frozen=True)
class Figures:
    """Bytes that a region needs.

    Attributes:
      inside: the most that is alive at one time of arrays that only the region has.
      before: the most that is alive at one time, of all arrays, while the region runs.
      after: the same with the region in parts.
    """

    inside: int
    before: int
    after: int

    @property
    def gain(self) -> int:
        return self.before - self.after


class LiveBytes:
    """Live ranges of what a list of equations makes, in the order of the list."""

    def __init__(self, graph: JaxprGraph):
        self.graph = graph
        self.count = len(graph.eqns)
        self.death = dict.fromkeys(graph.maker, 0)
        for v, i in graph.maker.items():
            users = graph.users.get(v, ())
            last = self.count if v in graph.outputs else max(users, default=i) + 1
            self.death[v] = last

    @cached_property
    def whole(self) -> np.ndarray:
        return self.profile({v: float(self.graph.size(v)) for v in self.graph.maker})

    def profile(self, sizes: dict[Any, float]) -> np.ndarray:
        """Bytes alive at each equation of these variables."""
        changes = np.zeros(self.count + 1)
        for v, size in sizes.items():
            changes[self.graph.maker[v]] += size
            changes[self.death[v]] -= size
        return changes.cumsum()[:-1]

    def of(self, region: Region) -> Figures:
        """What a region needs whole, and in its parts."""
        at = sorted(region.eqns)
        within = {v: float(self.graph.size(v)) for v in inner(self.graph, region)}
        inside = self.profile(within)
        less = inside * (1 - 1 / region.n)
        more = np.zeros(self.count)
        for i in at:
            if region.is_sum(i):  # carried from the first part on
                (v,) = self.graph.eqns[i].outvars
                more[at[0] : i] += self.graph.size(v)
                wide = max(4, v.aval.dtype.itemsize) / v.aval.dtype.itemsize
                more[at[0] : self.death[v]] += self.graph.size(v) * (wide - 1)
        after = self.whole - less + more
        figures = inside[at].max(), self.whole[at].max(), after[at].max()
        return Figures(*map(int, figures))

    @property
    def most(self) -> int:
        return int(self.whole.max(initial=0))
