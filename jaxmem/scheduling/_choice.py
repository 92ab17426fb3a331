"""How much of the forward pass is computed again: plain data, and the prices it means.

`Choice` is all that a search over budgets varies, so it is also all that must be kept
of a plan to have the same step again.
"""

import math
from dataclasses import dataclass, field

from jaxmem.ir.costs import MACHINES, fused_only, seconds
from jaxmem.scheduling.recompute.minimum_cut import Price


@dataclass(frozen=True)
class Choice:
    """What may be computed again to save bytes.

    Attributes:
      machine: the target whose rates say what an operation costs.
      rate: bytes that one would rather keep than compute for a second: the lower, the
        more is computed again. At infinity, and with None, it is what costs nothing.
      more: the same in the first layers, where it is lower than `rate`.
      part: how many of the layers these are, as a fraction.
      offload: bytes a layer from which what is kept waits in the host's memory; None:
        nothing does.
      segments: layers in a segment, of which only the first keeps its input until the
        backward pass runs them forward again, and in one of the segments inside of it;
        empty: every layer keeps its own.
      lists: whether equations outside of loops are computed again too.
      named: whether only what has a `checkpoint_name` is kept.
      waits: whether products that make much wait for those that free much.
      order: whether operations outside of loops come in an order of their own.
      sequence: numbers of operations outside of loops, some of them more than once, as
        `operations_of` counts them; empty for the order of the step.
      plain: whether the step is left as it was given, whatever the others say.
    """

    machine: str = "cpu"
    rate: float | None = None
    more: float | None = None
    part: float = 0.0
    offload: int | None = None
    segments: tuple[int, ...] = ()
    lists: bool = False
    named: bool = False
    waits: bool = False
    order: bool = False
    sequence: tuple[int, ...] = field(default=(), repr=False)
    plain: bool = False


NO_CHOICE = Choice()
NAMED = Choice(named=True)


def price_at(rate: float | None, machine: str) -> Price:
    """What one would pay, in bytes, for not doing an equation again."""
    if rate is None or math.isinf(rate):
        return fused_only
    chip = MACHINES[machine]

    def price(eqn) -> float | None:
        cost = seconds(eqn, chip)
        return None if cost is None else cost * rate

    return price
