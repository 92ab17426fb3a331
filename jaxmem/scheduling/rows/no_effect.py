"""What elementwise equations make of a gradient that is zero.

Three things are known of a value: that it is zero, that it is an input as it is, or
nothing. An update is exact on the touched rows alone if, for a gradient of zero, every
output is an input as it is. A zero times a number, or divided by one, is taken for
zero: where that number is not finite, or 0, the plain step gives NaN in rows without
gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxmem.ir import primitives
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.jaxprs import is_var

ZERO = "zero"
Known = Any  # ZERO, a variable of the inputs, or None


def of_zero(graph: JaxprGraph, gradient: Any) -> Callable[[Any], Known]:
    """A function of operands: what is known of them if `gradient` is zero."""
    found: dict[Any, Known] = {gradient: ZERO}

    def known(atom) -> Known:
        if not is_var(atom):
            return None if np.any(np.asarray(atom.val)) else ZERO
        if atom not in found:
            found[atom] = _made(graph, atom, known)
        return found[atom]

    # in order, so that nothing recurses deep
    for eqn in graph.eqns:
        for v in eqn.outvars:
            known(v)
    return known


def _made(graph: JaxprGraph, v, known: Callable) -> Known:
    i = graph.maker.get(v)
    if i is None:
        return v
    eqn = graph.eqns[i]
    if primitives.is_cast(eqn):
        return _cast(eqn, known(eqn.invars[0]))
    if primitives.of(eqn).same:
        return known(eqn.invars[eqn.outvars.index(v)])
    # an input in another shape is no longer an input as it is
    if primitives.of(eqn).rearranges:
        return ZERO if known(eqn.invars[0]) is ZERO else None
    return _arithmetic(eqn, [known(x) for x in eqn.invars])


def _cast(eqn, given: Known) -> Known:
    """An input stays as it is while it is held in a dtype that has all its values."""
    if given is None or given is ZERO:
        return given
    own, wide = given.aval.dtype, eqn.outvars[0].aval.dtype
    return given if np.can_cast(own, wide, "safe") or own == wide else None


def _arithmetic(eqn, given: Sequence[Known]) -> Known:
    name = eqn.primitive.name
    if primitives.is_sum(eqn):
        return _sum(*given)
    if name == "sub":
        return given[0] if given[1] is ZERO else None
    if name == "select_n":
        # whichever is chosen has to be the same, since the predicate is not known
        first, *others = given[1:]
        return first if all(x is first for x in others) else None
    return ZERO if _is_zero(eqn, given) else None


def _sum(a: Known, b: Known) -> Known:
    if a is ZERO:
        return b
    return a if b is ZERO else None


def _is_zero(eqn, given: Sequence[Known]) -> bool:
    """Whether what is computed of these is zero, whatever is not known of them."""
    name = eqn.primitive.name
    if name == "mul":
        return ZERO in given
    if name in ("max", "min"):
        return all(map(_limits(name), eqn.invars, given))
    keeps = primitives.of(eqn).keeps_zero or name == "div"
    keeps |= name == "integer_pow" and eqn.params["y"] > 0
    return keeps and given[0] is ZERO


def _limits(name: str) -> Callable[[Any, Known], bool]:
    """Whether an operand of `max` or `min` leaves a zero as it is."""

    def leaves_zero(atom, given: Known) -> bool:
        if given is ZERO:
            return True
        if is_var(atom):
            return False
        # the larger of zero and what is not above it is zero
        return bool(atom.val <= 0 if name == "max" else atom.val >= 0)

    return leaves_zero
