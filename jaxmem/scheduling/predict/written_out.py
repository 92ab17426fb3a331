"""One list of equations, as XLA sees it: whatever it inlines is written out in place.

Inner `jit`s, custom derivatives and remat are no operations of their own; loops and
branches stay.
"""

from collections.abc import Hashable
from typing import Any

import numpy as np

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.flatten import is_plain_call, opened


def written_out(closed, duplicates: bool = False):
    """The closed jaxpr without calls, and without what nobody needs."""
    # `duplicates`: whether what is computed twice stays so.
    # It does on a TPU, whose products compute in themselves what they read; elsewhere a
    # weight that each iteration of a written-out recurrence puts together is made once.
    made: dict[Hashable, tuple[list, list]] = {}  # with operands, so that ids stay

    def rule(eqn, args: list) -> list[Any] | None:
        if _is_inlined(eqn):
            return opened(eqn, args, rule)
        key = None if duplicates else _key(eqn, args)
        if key is None:
            return None
        if key not in made:
            made[key] = _compat.bind(eqn, args), args
        return made[key][0]

    flat = jaxprs.rewritten(closed, rule)
    return _compat.without_dead_code(flat)


def _is_inlined(eqn) -> bool:
    # of jitted functions those that ask for nothing that a call alone can say
    is_call = primitives.of(eqn).calls and not primitives.is_jit(eqn)
    return is_call or is_plain_call(eqn)


def _key(eqn, args: list) -> Hashable:
    """The same for equations that compute the same; None where XLA keeps them apart."""
    # Casts are computed by every kernel that reads them: one that is shared would seem
    # to lie in memory from its first reader to its last.
    apart = primitives.is_barrier(eqn) or primitives.is_cast(eqn)
    if apart or jaxprs.bodies(eqn):
        return None
    if _compat.has_side_effects(eqn) or not any(map(jaxprs.is_abstract, args)):
        return None  # of numbers alone is what each reader computes itself
    params = tuple(sorted(eqn.params.items()))
    try:
        hash(params)
    except TypeError:  # an array, say
        return None
    kinds = tuple(v.aval.str_short() + str(v.aval.weak_type) for v in eqn.outvars)
    return eqn.primitive, params, kinds, tuple(map(_operand, args))


def _operand(x) -> Hashable:
    if jaxprs.is_abstract(x) or np.ndim(x):
        return id(x)
    return type(x), np.asarray(x).tobytes()
