"""What the axis of a region is, in words that a user has for it, where one can tell."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxmem.scheduling.tiling.price import Cut


def axis_name(eqns: Sequence[Any], region: Cut, axes: Mapping[Any, int], seed) -> str:
    """ "heads", "vocabulary", "batch" or "tokens"; else the number of the seed's axis.

    Args:
      eqns: the list of equations that the region's positions are in.
      region: what is cut.
      axes: variable -> the axis along which it is cut.
      seed: the variable whose axis it is.
    """
    found = set(_of_products(eqns, region))
    if "heads" in found:
        return "heads"
    if "columns" in found:
        maxima = (i for i in region.eqns if eqns[i].primitive.name == "reduce_max")
        combined = any(region.cut[i][1][0] is None for i in maxima)
        return "vocabulary" if combined else str(axes[seed])
    if "rows" in found:
        leads = axes[seed] == 0 and seed.aval.ndim > 2
        return "batch" if leads else "tokens"
    return "batch" if "first" in found and axes[seed] == 0 else str(axes[seed])


def _of_products(eqns: Sequence[Any], region: Cut) -> Iterator[str]:
    """What the axis is to each product of the region."""
    for i in region.eqns:
        eqn, (ins, _) = eqns[i], region.cut[i]
        if eqn.primitive.name == "conv_general_dilated":
            image = eqn.params["dimension_numbers"].lhs_spec[0]
            yield "first" if ins[0] == image else "features"
        if eqn.primitive.name != "dot_general":
            continue
        _, (batch, _) = eqn.params["dimension_numbers"]
        left, right = ins
        if left is not None and left in batch:
            # of several batch axes of a product the batch itself comes first
            yield "heads" if batch.index(left) else "first"
        elif left is None:
            yield "columns" if right is not None else "whole"
        else:
            yield "rows"
