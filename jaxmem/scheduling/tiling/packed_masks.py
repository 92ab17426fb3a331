"""Masks of bits that a generator can only make as a whole: kept with eight to a byte.

Tiles would read the 32 random bits of each element, which are all there as long as the
tiles run. They read the mask instead, which is made once and unpacked tile by tile.
"""

from typing import Any

from jax.ad_checkpoint import checkpoint_name

from jaxmem import _compat
from jaxmem._bits import pack_bits, unpack_bits
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.placements.labels import draws_by_place
from jaxmem.ir.scans import is_mask
from jaxmem.scheduling.tiling.masks import PACKED, made_by


def with_packed_masks(closed):
    """The jaxpr in which such masks are packed, and unpacked for what reads them."""
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
