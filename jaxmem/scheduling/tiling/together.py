"""Operations that take the examples of a batch together.

A loss is the mean of what each example gives, or it is not: batch norm, a loss that
divides by the number of tokens that count, a contrastive loss. The axis of the examples
is followed through it, and operations where examples depend on each other are named.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.placements import REPLICATE, SUM, Shard
from jaxmem.ir.placements.bodies import NotInParts, named, summed_by
from jaxmem.ir.placements.propagate import Propagation
from jaxmem.ir.placements.rules import TWO, WHOLE
from jaxmem.ir.scans import is_var
from jaxmem.scheduling.tiling.loops import placements_of
from jaxmem.scheduling.tiling.partial_sums import (
    GOES_ON,
    MEETS,
    NEEDS_ALL,
    NEEDS_SUM,
)
from jaxmem.scheduling.tiling.shard_parts import Parts

_WHYS = frozenset({MEETS, NEEDS_ALL, NEEDS_SUM, GOES_ON})
_NO_SUM = "the loss is no sum over its examples"
_PRODUCT = "its examples meet each other"


class Together(NamedTuple):
    """An operation in which examples depend on each other.

    Attributes:
      text: its name, its line and why.
      of_sums: whether it takes sums over the examples alone, as a mean over the tokens
        that count does.
    """

    text: str
    of_sums: bool


def together(closed: Any, given: Iterable[int], n: int) -> tuple[Together, ...]:
    """The operations of a loss in which its examples depend on each other.

    Args:
      closed: the loss, a closed jaxpr with one scalar output.
      given: positions of its arguments with the examples along axis 0.
      n: in how many parts the examples are taken; it divides their number.

    Returns:
      The first of each chain of such operations, in order. What is made of an operation
      of which nothing is known is not followed.
    """
    jaxpr = jaxprs.split(closed)[0]
    walk = _Walk({jaxpr.invars[i]: Shard(0) for i in given}, parts=Parts(1, n))
    for i, eqn in enumerate(jaxpr.eqns):
        walk.follow(i, eqn)
    (loss,) = jaxpr.outvars
    if is_var(loss) and walk.at(loss) not in (REPLICATE, SUM):
        by = summed_by(jaxpr.eqns, walk.placed, loss)
        walk.found[Together(f"{named(by)}: {_NO_SUM}", False)] = None
    return tuple(walk.found)


@dataclass
class _Walk(Propagation):
    """Through the equations of a loss, in order.

    Attributes:
      parts: in how many parts the examples are taken.
      sums: variables made of sums over the examples -> the first operation that took
        such a sum.
      unknown: variables of which nothing is known.
      found: the operations.
    """

    parts: Parts = field(kw_only=True)
    sums: dict[Any, Together] = field(default_factory=dict)
    unknown: set[Any] = field(default_factory=set)
    found: dict[Together, None] = field(default_factory=dict)

    def follow(self, i: int, eqn) -> None:
        operands = [v for v in eqn.invars if is_var(v)]
        first = next((self.sums[v] for v in operands if v in self.sums), None)
        is_known = self.unknown.isdisjoint(operands)
        if first is None and is_known:
            self.place_all(i, eqn)
            return
        meets = any(isinstance(self.at(v), Shard) for v in operands)
        if is_known and not meets:
            self.sums.update(dict.fromkeys(eqn.outvars, first))
            return
        self.unknown.update(eqn.outvars)
        if (
            first is not None and first in self.found
        ):  # examples take it, as in batch norm
            meets = first._replace(of_sums=False)
            places = (meets if one == first else one for one in self.found)
            self.found = dict.fromkeys(places)

    def place_all(self, i: int, eqn) -> None:
        try:
            whole = [REPLICATE] * len(eqn.outvars)
            found = placements_of(eqn, self.all_at(eqn.invars), whole, self.parts)
        except NotInParts as reason:
            one = _named(reason)
            if one is not None:
                self.found[one] = None
            if one is not None and one.of_sums:
                self.sums.update(dict.fromkeys(eqn.outvars, one))
            else:
                self.unknown.update(eqn.outvars)
            return
        if found is not None:
            self.place(i, eqn, found)


def _named(reason: NotInParts) -> Together | None:
    why = reason.why
    # of others that cannot be cut along it (a reshape, a kernel) it is not known
    if why == WHOLE and primitives.of(reason.eqn).mixes:
        return Together(str(reason), False)
    if why == TWO and primitives.is_dot(reason.eqn):
        return Together(f"{named(reason.eqn, reason.line)}: {_PRODUCT}", False)
    return Together(str(reason), why == NEEDS_SUM) if why in _WHYS else None
