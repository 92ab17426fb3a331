"""Masks and positions that nothing is needed for: each user makes its own.

A mask that several equations share stays whole. Where each user makes it anew, every
tile makes its part of it.
"""

from collections.abc import Sequence
from typing import Any

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.ir.jaxprs import is_var
from jaxmem.ir.primitives import ELEMENTWISE

_CHEAP = ELEMENTWISE | {"iota", "broadcast_in_dim", "reshape"}


def from_nothing(eqns: Sequence[Any]) -> int:
    """Equations whose results are made of literals alone, as bits."""
    free: set[Any] = set()
    found = 0
    for i, eqn in enumerate(eqns):
        of_free = all(not is_var(v) or v in free for v in eqn.invars)
        if eqn.primitive.name in _CHEAP and of_free:
            found |= 1 << i
            free.update(eqn.outvars)
    return found


def with_private_masks(closed):
    """The jaxpr in which every user of a mask makes it for itself."""
    eqns = jaxprs.split(closed)[0].eqns
    free = from_nothing(eqns)
    maker = {v: e for i, e in enumerate(eqns) if free >> i & 1 for v in e.outvars}
    if not maker:
        return closed

    def made(v) -> Any:
        operands = (made(w) if is_var(w) else w.val for w in maker[v].invars)
        return _compat.bind(maker[v], list(operands))[0]

    def rule(eqn, values: list) -> list[Any] | None:
        if eqn.outvars and eqn.outvars[0] in maker:
            return None
        pairs = zip(eqn.invars, values, strict=True)
        fresh = [made(v) if is_var(v) and v in maker else x for v, x in pairs]
        return _compat.bind(eqn, fresh)

    run = lambda args: jaxprs.evaluate(closed, args, rule)
    return _compat.without_dead_code(jaxprs.retrace(closed, run))
