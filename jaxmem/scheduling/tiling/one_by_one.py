"""Scans that go through the examples one after another: `lax.map`, and its gradient.

A part has fewer iterations, where none needs what another has made. What is carried may
be added to, and nothing else: then a part has a term of the sum.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.placements import REPLICATE, SUM, Placement, Placements, Shard
from jaxmem.ir.placements.bodies import NotInParts, are_whole
from jaxmem.ir.scans import is_var

_EACH = Shard(0)


def is_one_by_one(eqn, ins: Sequence[Placement], wanted: Sequence[Placement]) -> bool:
    """Whether the examples are the iterations of a scan."""
    n_consts, n_carry = _compat.scan_counts(eqn)
    return _EACH in (*ins[n_consts + n_carry :], *wanted[n_carry:])


def placements_of(eqn, ins: Sequence[Placement], n: int) -> Placements:
    """How such a scan works on one of `n` parts.

    Args:
      eqn: the scan.
      ins: what a part has of each operand.
      n: how many parts there are.

    Raises:
      NotInParts: an iteration needs what is of other examples.
    """
    n_consts, n_carry = _compat.scan_counts(eqn)
    end = n_consts + n_carry
    consts, carried, stacks = ins[:n_consts], ins[n_consts:end], ins[end:]
    if not are_whole(consts):
        raise NotInParts(eqn, "each example needs all others")
    if any(p not in (REPLICATE, _EACH) for p in stacks):
        raise NotInParts(eqn, "examples along two axes of one scan")
    if eqn.params["length"] % n:
        raise NotInParts(eqn, f"{n} does not divide its axis")
    body = jaxprs.split(eqn.params["jaxpr"])[0]
    added = [_is_added_to(body, n_consts + k, k) for k in range(n_carry)]
    if not all(added) or any(p not in (REPLICATE, SUM) for p in carried):
        raise NotInParts(eqn, "it goes through the examples one after another")
    sums, each = (SUM,) * n_carry, (_EACH,) * (len(eqn.outvars) - n_carry)
    return Placements((*consts, *sums, *(_EACH for _ in stacks)), sums + each)


def _is_added_to(body: Any, i: int, k: int) -> bool:
    """Whether output k of a body is its input i and a term, and i is for that alone."""
    total, new = body.invars[i], body.outvars[k]
    uses = [eqn for eqn in body.eqns for v in eqn.invars if v is total]
    if len(uses) != 1 or any(v is total for v in body.outvars):
        return False
    (eqn,) = uses
    adds = primitives.is_sum(eqn) and eqn.outvars[0] is new
    return adds and is_var(new) and jnp.issubdtype(new.aval.dtype, jnp.inexact)
