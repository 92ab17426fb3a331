"""Bytes that a region of a list of equations needs, whole and in tiles."""

from dataclasses import dataclass

import numpy as np

from jaxmem.cost.live_bytes import LiveBytes
from jaxmem.cost.sums import sum_bytes
from jaxmem.scheduling.tiling.regions import Region, inner


@dataclass(frozen=True)
class Figures:
    """Bytes that a region needs on one device.

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


def figures_of(live: LiveBytes, region: Region) -> Figures:
    """What a region needs whole, and in its parts."""
    at = sorted(region.eqns)
    own = inner(live.graph, region)
    inside = live.profile({v: s for v, s in live.sizes.items() if v in own})
    less = inside * (1 - 1 / region.n)
    more = np.zeros(live.count)
    for i in filter(region.is_sum, at):  # carried from the first part on
        (v,) = live.graph.eqns[i].outvars
        total = sum_bytes(live.graph.eqns[i], v, live.spreads)
        more[at[0] : i] += total
        more[i : live.death[v]] += total - live.sizes[v]
    after = live.whole - less + more
    figures = inside[at].max(), live.whole[at].max(), after[at].max()
    return Figures(*map(int, figures))
