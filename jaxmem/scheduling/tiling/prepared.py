"""A list of equations in the form in which regions are looked for.

Calls are written out, every user of a mask makes it for itself, or unpacks it, and a
barrier holds one array each, so that none ties arrays of different axes. What of that
no region has taken is put together again: recomputation waits for its gradient.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxmem import _compat
from jaxmem._bits import pack_bits, unpack_bits
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.placements.labels import draws_by_place
from jaxmem.ir.scans import is_mask, is_var
from jaxmem.scheduling.tiling.masks import PACKED, made_by, with_private_masks


def prepared(closed, in_scan: bool):
    """The same computation; `in_scan`: the list is the body of a scan."""
    # In a body there is nothing for XLA to merge a recomputation with, and a barrier
    # would only hold tiles together.
    written = _written_out(closed, keeps_barriers=not in_scan)
    packed = _with_packed_masks(written)
    if packed is not written:
        packed = _written_out(packed, keeps_barriers=not in_scan)
    return with_private_masks(packed)


def _written_out(closed, keeps_barriers: bool):
    def rule(eqn, args: list) -> list[Any] | None:
        if primitives.is_barrier(eqn):
            return [lax.optimization_barrier(x) if keeps_barriers else x for x in args]
        if not primitives.of(eqn).calls:
            return None
        if keeps_barriers and eqn.params.get("differentiated"):
            args = [lax.optimization_barrier(x) for x in args]
        return jaxprs.evaluate(called(eqn), args, rule)

    return _compat.without_dead_code(jaxprs.rewritten(closed, rule))


def with_whole_barriers(closed):
    """The jaxpr in which barriers of one array each, side by side, are one barrier.

    `prepared` undone, where no region has taken them.
    """
    jaxpr = jaxprs.split(closed)[0]
    eqns = [eqn for group in _side_by_side(jaxpr.eqns) for eqn in group]
    if len(eqns) == len(jaxpr.eqns):
        return closed
    return closed.replace(jaxpr=jaxpr.replace(eqns=eqns))


def _side_by_side(eqns: list[Any]) -> Iterator[list[Any]]:
    """The equations, barriers that stand side by side as one of each set of axes."""
    for holds, group in groupby(eqns, primitives.is_barrier):
        if not holds:
            yield list(group)
            continue
        waiting: dict[frozenset[str], Any] = {}
        for eqn in group:
            made = {v for one in waiting.values() for v in one.outvars}
            if made.intersection(filter(is_var, eqn.invars)):
                yield list(waiting.values())
                waiting = {}
            axes = _compat.varying_axes(*(v.aval for v in eqn.invars))
            if axes in waiting:
                first = waiting[axes]
                invars, outvars = first.invars + eqn.invars, first.outvars + eqn.outvars
                eqn = first.replace(invars=invars, outvars=outvars)
            waiting[axes] = eqn
        yield list(waiting.values())


def called(eqn) -> Any:
    """The body of a call; that of a custom rule is its function's, not its rule's."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in eqn.params:
            return eqn.params[name]
    raise AssertionError(eqn.primitive.name)


def _with_packed_masks(closed):
    """The jaxpr in which masks of bits that are made as a whole have eight to a byte.

    Tiles would read the 32 random bits of each element, which are all there as long as
    the tiles run. They read the mask instead, which is made once and unpacked tile by
    tile.
    """
    jaxpr = jaxprs.split(closed)[0]
    eqns, packed = jaxpr.eqns, set()
    for i in sorted(made_by(eqns, _draws_whole)):
        eqn = eqns[i]
        (v,) = eqn.outvars[:1]
        # a mask that is made of masks is made anew of them
        if is_mask(v) and not any(map(is_mask, eqn.invars)) and v not in jaxpr.outvars:
            packed.add(v)
    if not packed:
        return closed

    def kept(eqn, *values):
        (mask,) = _compat.bind(eqn, values)
        return [unpack_bits(checkpoint_name(pack_bits(mask), PACKED), mask.shape)]

    def rule(eqn, values: list) -> list[Any] | None:
        if not packed.intersection(eqn.outvars):
            return None
        return _compat.in_context_of(eqn, kept, eqn, *values)

    return jaxprs.rewritten(closed, rule)


def _draws_whole(eqn) -> bool:
    """Whether random bits are made of which no part can be made alone."""
    return primitives.is_random_bits(eqn) and not draws_by_place(eqn)
