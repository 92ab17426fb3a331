"""What it costs to run a region in tiles: seconds beyond those of it as it is."""

from collections.abc import Sequence
from typing import Any

from jaxmem.cost.parts import Price, total
from jaxmem.ir.shards import WHOLE, Spreads
from jaxmem.scheduling.tiling.regions import Region


def seconds(
    eqns: Sequence[Any], region: Region, target: str, spreads: Spreads = WHOLE
) -> float:
    """What a region takes longer in its tiles than as it is, on a chip.

    Args:
      eqns: the list of equations that the region's positions are in.
      region: what is cut, and along which axes.
      target: the chip's name, one of `jaxmem.targets()`.
      spreads: how the arrays are spread over devices; the seconds are those of one.

    Returns:
      Seconds, 0.0 where the tiles cost nothing by the roofline.
    """
    price = Price(target, spreads)
    whole = total(price.whole(eqns[i]) for i in region.eqns)
    cuts = ((eqns[i], region.cut[i]) for i in region.eqns)
    tile = total(price.part(eqn, cut.ins, cut.outs, region.n) for eqn, cut in cuts)
    # random bits that others need too are drawn once more
    bits = sum(map(price.seconds, _drawn_twice(eqns, region)))
    return price.longer(whole, [tile], region.n) + bits


def _drawn_twice(eqns: Sequence[Any], region: Region) -> list[Any]:
    """What draws random bits in a region that others outside of it draw too."""
    draws = {i for i, e in enumerate(eqns) if e.primitive.name == "random_bits"}
    of = lambda i: (eqns[i].invars[0], str(eqns[i].params))
    outside = set(map(of, draws - region.eqns))
    return [eqns[i] for i in draws & region.eqns if of(i) in outside]
