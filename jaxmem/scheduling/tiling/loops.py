"""One operation on a part of the examples: scans, branches and calls too."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.flatten import why_closed
from jaxmem.ir.placements import REPLICATE, SUM, Placement, Placements, Shard, bodies
from jaxmem.ir.placements.bodies import NotInParts, are_whole, line_of
from jaxmem.ir.scans import is_var
from jaxmem.scheduling.tiling.partial_sums import GOES_ON, placements_of_operation
from jaxmem.scheduling.tiling.prepared import called
from jaxmem.scheduling.tiling.shard_parts import Parts


def is_nested(eqn) -> bool:
    """Whether an equation is one whose bodies are understood here."""
    nested = primitives.is_scan(eqn) or primitives.is_branch(eqn)
    return nested or primitives.of(eqn).calls


def placements_of(
    eqn, ins: Sequence[Placement], wanted: Sequence[Placement], parts: Parts
) -> Placements | None:
    """`placements_of_operation`, of scans, branches and calls too."""
    if are_whole([*ins, *wanted]):
        return None
    if not is_nested(eqn):
        return placements_of_operation(eqn, ins, wanted, parts)
    try:
        return _nested(eqn, ins, wanted, parts)
    except NotInParts as reason:
        if are_whole(ins):
            return None
        # what JAX has traced once for all its callers has no line of its own
        reason.line = reason.line or line_of(eqn)
        raise


def _inside(
    eqn, ins: Sequence[Placement], wanted: Sequence[Placement], parts: Parts
) -> Placements | None:
    """`placements_of` of an equation in a body."""
    found = placements_of(eqn, ins, wanted, parts)
    ends = (REPLICATE, SUM)
    if found and not all(p in ends or isinstance(p, Shard) for p in found.outs):
        raise NotInParts(eqn, GOES_ON)
    return found


def _nested(eqn, ins, wanted, parts: Parts) -> Placements:
    rule = partial(_inside, parts=parts)
    if _compat.has_side_effects(eqn):
        raise NotInParts(eqn, "it has side effects")
    if primitives.is_scan(eqn):
        if _is_one_by_one(eqn, ins, wanted):
            return _of_examples(eqn, ins, parts.blocks)
        return bodies.of_scan(eqn, ins, wanted, rule)
    if primitives.is_branch(eqn):
        if ins[0] != REPLICATE:
            raise NotInParts(eqn, "which branch it takes depends on the examples")
        return bodies.of_branches(eqn, ins, wanted, rule)
    if primitives.is_jit(eqn) and (why := why_closed(eqn)):
        raise NotInParts(eqn, why)
    return bodies.of_call(called(eqn), ins, wanted, rule)


_EACH = Shard(0)


def _is_one_by_one(eqn, ins: Sequence[Placement], wanted: Sequence[Placement]) -> bool:
    """Whether the examples are the iterations of a scan."""
    n_consts, n_carry = _compat.scan_counts(eqn)
    return _EACH in (*ins[n_consts + n_carry :], *wanted[n_carry:])


def _of_examples(eqn, ins: Sequence[Placement], n: int) -> Placements:
    """How such a scan (`lax.map`, and its gradient) works on one of `n` parts.

    A part has fewer iterations, where none needs what another has made. What is carried
    may be added to, and nothing else: then a part has a term of the sum.
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
