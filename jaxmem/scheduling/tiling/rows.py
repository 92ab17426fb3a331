"""A region in tiles as a row of the plan."""

from collections.abc import Sequence
from typing import Any

from jaxmem import _compat
from jaxmem.scheduling.plan.rows import TiledRegion
from jaxmem.scheduling.tiling.axis_name import axis_name
from jaxmem.scheduling.tiling.best import Found
from jaxmem.scheduling.tiling.price import seconds


def row_of(eqns: Sequence[Any], found: Found, times: int, target: str) -> TiledRegion:
    """The row of a region; `times`: how often the list of equations runs."""
    region, seed = found.region, found.seed
    maker = next(eqn for eqn in eqns if seed in eqn.outvars)
    return TiledRegion(
        seed.aval.shape,
        str(seed.aval.dtype),
        _compat.name_stack(maker),
        _compat.source_line(maker),
        axis_name(eqns, region, seed),
        region.n,
        found.figures.before,
        found.figures.after,
        times,
        times * seconds(eqns, region, target),
    )
