"""A region in tiles as a row of the plan, and what stands at its border."""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxmem import _compat
from jaxmem.ir.scans import is_var, size_of
from jaxmem.scheduling.plan.rows import TiledRegion
from jaxmem.scheduling.tiling.axis_name import axis_name
from jaxmem.scheduling.tiling.list_regions import Found
from jaxmem.scheduling.tiling.masks import is_packed
from jaxmem.scheduling.tiling.regions import AT_ONCE, NEEDS_ALL

_LARGE = 16  # of the largest array of a region: what a smaller one does is not told


def row_of(eqns: Sequence[Any], found: Found, times: int) -> TiledRegion:
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
        times * found.seconds,
    )


def whole_ones(eqns: Sequence[Any], found: Found) -> Iterator[str]:
    """A sentence for each operation that large arrays tie to a region, and why not."""
    least = size_of(found.seed) / _LARGE
    read = {v for i in found.region.eqns for v in filter(is_var, eqns[i].invars)}
    packed = (i for i, e in enumerate(eqns) if is_packed(e) and e.outvars[0] in read)
    blocked = found.region.blocked | dict.fromkeys(packed, AT_ONCE)
    for i, why in sorted(blocked.items()):
        eqn = eqns[i]
        if i in found.region.eqns or why.startswith(NEEDS_ALL):
            continue  # that follows from another
        arrays = filter(is_var, [*eqn.invars, *eqn.outvars])
        name, size = eqn.primitive.name, max(map(size_of, arrays), default=0)
        if is_packed(eqn):  # a bit of each element, that 32 were drawn for
            name, size = "random_bits", 32 * size
        if size >= least:
            line = _compat.source_line(eqn)
            where = f" at {line}" if line else ""
            yield f"`{name}`{where} is not in the tiles next to it: {why}"
