"""How one operation works on one part of the examples.

What a part has of an array is its slice of it, a term of it, or the whole array, where
it is the same for every part.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from jaxmem.ir import primitives
from jaxmem.ir.placements import REPLICATE, SUM, Partial, Placement, Placements, Shard
from jaxmem.ir.placements.bodies import NotInParts, are_whole
from jaxmem.ir.placements.rules import place
from jaxmem.ir.primitives import Kind
from jaxmem.ir.scans import is_var
from jaxmem.ir.shards import held_labels
from jaxmem.scheduling.tiling.shard_parts import Parts

# why an operation cannot be done part by part, where examples depend on each other
MEETS = "an array of some examples meets a sum over all of them"
NEEDS_ALL = "it needs what all examples give"
NEEDS_SUM = "it needs the sum over all examples"
GOES_ON = "it needs all examples before the body goes on"


_JOINED = ("neg", "add_any", "concatenate", "stack", "unstack")


def moves_sums(eqn) -> bool:
    """Whether it changes where a sum lies, or adds sums.

    An optimizer's arithmetic does neither.
    """
    known = primitives.of(eqn)
    return known.rearranges or known.name in _JOINED


def placements_of_operation(
    eqn, ins: Sequence[Placement], wanted: Sequence[Placement], parts: Parts
) -> Placements | None:
    """How an equation without bodies works on one of `n` parts.

    Args:
      eqn: the equation.
      ins: what a part has of each operand.
      wanted: how outputs had best be cut; `REPLICATE` where nobody asks.
      parts: how the examples are cut.

    Returns:
      Its placements; None where all operands are whole and nothing can be cut.

    Raises:
      NotInParts: it needs all examples.
    """
    if any(isinstance(p, Partial) for p in ins):
        return _on_terms(eqn, ins)
    if primitives.is_barrier(eqn):
        pairs = zip(ins, wanted, strict=True)
        kept = tuple(w if p == REPLICATE else p for p, w in pairs)
        return Placements(kept, kept)
    whole = are_whole(ins)
    if primitives.of(eqn).kind is Kind.PSUM:  # n parts would send n times as many
        if whole:
            return None
        raise NotInParts(eqn, "it sums over devices")
    asks = wanted if whole else [REPLICATE] * len(eqn.outvars)
    is_held = primitives.is_constraint(eqn)
    table = held_labels(eqn, parts.shards) if is_held else None
    found = place(eqn, ins, asks, parts.blocks, table)
    if isinstance(found, str):
        if whole:
            return None
        raise NotInParts(eqn, found)
    if found.op and primitives.of(eqn).kind is Kind.SCATTER:
        if found.op != SUM.op:
            raise NotInParts(eqn, "what its parts write cannot be combined")
        # what it adds to counts once
        return Placements((SUM, *found.ins[1:]), found.outs)
    return found


def _on_terms(eqn, ins: Sequence[Placement]) -> Placements:
    """An equation that is linear in operands of which a part has a term."""
    known, count = primitives.of(eqn), len(eqn.invars)
    terms = [k for k, p in enumerate(ins) if p == SUM]
    if any(isinstance(p, Shard) for p in ins):
        raise NotInParts(eqn, MEETS)
    if any(p not in (REPLICATE, SUM) for p in ins):
        raise NotInParts(eqn, NEEDS_ALL)
    # where a sum is to be, a constraint says of the sum, and not of its terms
    if primitives.is_barrier(eqn) or primitives.is_constraint(eqn):
        return Placements(tuple(ins), tuple(ins))
    linear = [*range(count)[known.linear]] if known.linear else []
    asked = terms if known.bilinear else linear
    is_linear = len(terms) == 1 if known.bilinear else set(terms) <= set(linear)
    floats = (jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)
    if known.name == "pad":
        is_linear &= not is_var(eqn.invars[1]) and eqn.invars[1].val == 0
    if not is_linear or not all(floats):
        raise NotInParts(eqn, NEEDS_SUM)
    return Placements(
        tuple(SUM if k in asked else REPLICATE for k in range(count)),
        (SUM,) * len(eqn.outvars),
    )
