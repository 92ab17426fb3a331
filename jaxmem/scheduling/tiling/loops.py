"""One operation on a part of the examples: scans, branches and calls too."""

from collections.abc import Sequence
from functools import partial

from jaxmem import _compat
from jaxmem.ir import primitives
from jaxmem.ir.flatten import why_closed
from jaxmem.ir.placements import REPLICATE, SUM, Placement, Placements, Shard, bodies
from jaxmem.ir.placements.bodies import NotInParts, are_whole, line_of
from jaxmem.scheduling.tiling import one_by_one
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
        if one_by_one.is_one_by_one(eqn, ins, wanted):
            return one_by_one.placements_of(eqn, ins, parts.blocks)
        return bodies.of_scan(eqn, ins, wanted, rule)
    if primitives.is_branch(eqn):
        if ins[0] != REPLICATE:
            raise NotInParts(eqn, "which branch it takes depends on the examples")
        return bodies.of_branches(eqn, ins, wanted, rule)
    if primitives.is_jit(eqn) and (why := why_closed(eqn)):
        raise NotInParts(eqn, why)
    return bodies.of_call(called(eqn), ins, wanted, rule)
