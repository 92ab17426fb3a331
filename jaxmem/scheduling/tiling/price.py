"""What a region of a list of equations saves in tiles, and what it costs."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmem.cost.live_bytes import LiveBytes
from jaxmem.cost.parts import Price, sum_bytes
from jaxmem.ir import primitives
from jaxmem.ir.shards import WHOLE, Shardings
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


@dataclass(frozen=True)
class RegionBytes:
    """Bytes alive at each equation of a region, for any number of parts.

    Attributes:
      whole: of all arrays, with the region whole.
      inside: of arrays that only the region has.
      more: of what there is beside these in parts: sums, which are carried from the
        first part on, and what parts write for others.
    """

    whole: np.ndarray
    inside: np.ndarray
    more: np.ndarray

    @classmethod
    def of(cls, live: LiveBytes, region: Region) -> "RegionBytes":
        at = sorted(region.eqns)
        own = inner(live.graph, region)
        inside = live.profile({v: s for v, s in live.sizes.items() if v in own})
        more = np.zeros(live.count)
        for i in filter(region.is_sum, at):
            (v,) = live.graph.eqns[i].outvars
            total = sum_bytes(live.graph.eqns[i], v, live.shardings)
            more[at[0] : i] += total
            more[i : live.death[v]] += total - live.sizes[v]
        for v in _written(live, region, own):
            more[at[0] : live.death[v]] += live.shardings.bytes_of(v)
        return cls(live.whole[at], inside[at], more[at])

    def in_parts(self, n: int) -> Figures:
        """What the region needs whole, and in n parts."""
        after = self.whole - self.inside * (1 - 1 / n) + self.more
        of = self.inside, self.whole, after
        return Figures(*(int(profile.max()) for profile in of))


def _written(live: LiveBytes, region: Region, own: Collection[Any]) -> Iterator[Any]:
    """What parts write to memory for others, and what was fused into these before."""
    for i in region.eqns:
        for v in live.graph.eqns[i].outvars:
            if not (v in own or v in live.sizes or region.is_sum(i)):
                yield v


def seconds(
    eqns: Sequence[Any], region: Region, target: str, shardings: Shardings = WHOLE
) -> float:
    """What a region takes longer in its tiles than as it is, on a chip.

    Args:
      eqns: the list of equations that the region's positions are in.
      region: what is cut, and along which axes.
      target: the chip's name, one of `jaxmem.targets()`.
      shardings: how the arrays are sharded over devices; the seconds are those of one.

    Returns:
      Seconds, 0.0 where the tiles cost nothing by the roofline.
    """
    price = Price(target, shardings)
    whole = sum(price.whole(eqns[i]) for i in sorted(region.eqns))
    cuts = ((eqns[i], region.placed[i]) for i in sorted(region.eqns))
    tile = sum(price.part(eqn, placed, region.n) for eqn, placed in cuts)
    # random bits that others need too are drawn once more
    bits = sum(map(price.seconds, _drawn_twice(eqns, region)))
    return price.longer(whole, [tile], region.n) + bits


def _drawn_twice(eqns: Sequence[Any], region: Region) -> list[Any]:
    """What draws random bits in a region that others outside of it draw too."""
    draws = {i for i, e in enumerate(eqns) if primitives.is_random_bits(e)}
    of = lambda i: (eqns[i].invars[0], str(eqns[i].params))
    outside = set(map(of, draws - region.eqns))
    return [eqns[i] for i in draws & region.eqns if of(i) in outside]
