"""A region in tiles as a row of the plan, and what stands at its border."""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxmem import _compat
from jaxmem.ir import primitives
from jaxmem.ir.scans import is_var, size_of
from jaxmem.scheduling.plan.rows import TiledRegion
from jaxmem.scheduling.tiling.list_regions import Found
from jaxmem.scheduling.tiling.masks import is_packed
from jaxmem.scheduling.tiling.regions import AT_ONCE, NEEDS_ALL, Region

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
        _axis_name(eqns, region, seed),
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


def _axis_name(eqns: Sequence[Any], region: Region, seed) -> str:
    """ "heads", "vocabulary", "batch" or "tokens"; else the number of its axis."""
    found = set(_of_products(eqns, region))
    if "heads" in found:
        return "heads"
    if "columns" in found:
        maxima = (i for i in region.eqns if eqns[i].primitive.name == "reduce_max")
        combined = any(region.is_sum(i) for i in maxima)
        return "vocabulary" if combined else str(region.axes[seed])
    if "rows" in found:
        leads = region.axes[seed] == 0 and seed.aval.ndim > 2
        return "batch" if leads else "tokens"
    return (
        "batch"
        if "first" in found and region.axes[seed] == 0
        else str(region.axes[seed])
    )


def _of_products(eqns: Sequence[Any], region: Region) -> Iterator[str]:
    """What the axis is to each product of the region."""
    for i in region.eqns:
        eqn, ins = eqns[i], region.placed[i].in_axes
        if primitives.is_convolution(eqn):
            image = eqn.params["dimension_numbers"].lhs_spec[0]
            yield "first" if ins[0] == image else "features"
        if not primitives.is_dot(eqn):
            continue
        _, (batch, _) = eqn.params["dimension_numbers"]
        left, right = ins
        if left is not None and left in batch:
            # of several batch axes of a product the batch itself comes first
            yield "heads" if batch.index(left) else "first"
        elif left is None:
            # of weights; else keys and queries have changed places
            weights = right is not None and not batch
            yield "columns" if weights else "rows"
        else:
            yield "rows"
