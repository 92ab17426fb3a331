"""What it may cost to recompute an operation, in bytes that need not be kept for it."""

import math
from collections.abc import Callable
from typing import Any

from jaxmem.ir.costs import MACHINES, fused_only, seconds

Price = Callable[[Any], float | None]  # of an equation; None: never recomputed


def price_at(rate: float | None, target: str) -> Price:
    """What one would pay, in bytes, for not recomputing an equation."""
    # `rate`: bytes that one would rather keep than compute for a second on `target`; at
    # infinity, and with None, only what costs nothing is recomputed.
    if rate is None or math.isinf(rate):
        return fused_only
    chip = MACHINES[target]

    def price(eqn) -> float | None:
        cost = seconds(eqn, chip)
        return None if cost is None else cost * rate

    return price
