"""One list of equations, as XLA sees it: whatever it inlines is written out in place.

Inner `jit`s, custom derivatives and remat are no operations of their own; loops and
branches stay.
"""

from collections.abc import Hashable
from typing import Any

import numpy as np

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.ir.flatten import is_plain_call, opened

_CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
# Casts are computed by every kernel that reads them: one that is shared would seem to
# lie in memory from its first reader to its last.
_APART = ("optimization_barrier", "convert_element_type")


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

    flat = jaxprs.retrace(closed, lambda args: jaxprs.evaluate(closed, args, rule))
    return _compat.without_dead_code(flat)


def _is_inlined(eqn) -> bool:
    name = eqn.primitive.name
    return name in _CUSTOM or name in jaxprs.TAKES_OPEN_JAXPR or is_plain_call(eqn)


def _key(eqn, args: list) -> Hashable:
    """The same for equations that compute the same; None where XLA keeps them apart."""
    if eqn.primitive.name in _APART or jaxprs.bodies(eqn):
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
