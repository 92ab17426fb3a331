"""What the axis of a region is, in words that a user has for it, where one can tell."""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxmem.ir import primitives
from jaxmem.scheduling.tiling.regions import Region


def axis_name(eqns: Sequence[Any], region: Region, seed) -> str:
    """ "heads", "vocabulary", "batch" or "tokens"; else the number of the seed's axis.

    Args:
      eqns: the list of equations that the region's positions are in.
      region: what is cut.
      seed: the variable whose axis it is.
    """
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
