"""Equations whose results are zero because operands are."""

from collections.abc import Sequence

from jaxmem.ir import primitives
from jaxmem.ir.types import JaxprEqn


def gives_zeros(eqn: JaxprEqn, zeros: Sequence[bool]) -> bool:
    """Whether results are zero where these operands are known to be."""
    known = primitives.of(eqn)
    if known.bilinear:
        return any(zeros)
    if known.same or known.name == "pad":
        return all(zeros)
    if known.name == "integer_pow":
        return zeros[0] and eqn.params["y"] > 0
    # an index outside of the array may be read as NaN
    if known.linear is not None and not primitives.is_gather(eqn):
        return all(zeros[known.linear])
    return known.keeps_zero and zeros[0]
