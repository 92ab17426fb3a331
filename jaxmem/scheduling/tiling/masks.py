"""Masks that are made of next to nothing: each user makes its own.

A mask that several equations share stays whole. Where each user makes it anew, every
tile makes its part of it. Positions are made of nothing, random bits of a key, and what
a generator can only make as a whole of its mask in bits (`prepared.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.jaxprs import elements, is_var
from jaxmem.ir.placements.labels import draws_by_place

PACKED = "jaxmem.packed_mask"  # the name of a mask that is kept in bits


def from_nothing(eqns: Sequence[Any]) -> set[int]:
    """Equations whose results are made of literals alone."""
    free: set[Any] = set()
    found = set()
    for i, eqn in enumerate(eqns):
        of_free = all(not is_var(v) or v in free for v in eqn.invars)
        if primitives.of(eqn).cheap and of_free:
            found.add(i)
            free.update(eqn.outvars)
    return found


def drawn(eqns: Sequence[Any]) -> set[int]:
    """Equations whose results are made of keys, scalars and literals by random bits.

    The counters of the bits are among them; keys, scalars and packed masks are not.
    """
    return made_by(eqns, _draws)


def made_by(eqns: Sequence[Any], draws: Callable[[Any], bool]) -> set[int]:
    """`drawn`, with the equations that make random bits, or unpack them, by `draws`."""
    maker: dict[Any, int] = {}
    packed: set[Any] = set()
    before: dict[int, set[int]] = {}
    found: set[int] = set()
    for i, eqn in enumerate(eqns):
        if is_packed(eqn):
            packed.update(eqn.outvars)
            continue
        first, operands = draws(eqn), list(filter(is_var, eqn.invars))
        ready = all(v in maker or v in packed or _is_small(v) for v in operands)
        if not (first or _is_of_bits(eqn)) or not ready:
            continue
        if all(map(_is_small, eqn.outvars)):
            continue
        maker.update(dict.fromkeys(eqn.outvars, i))
        before[i] = {maker[v] for v in operands if v in maker}
        if first or before[i] & found or packed.intersection(operands):
            found.add(i)
    work = list(found)
    while work:
        new = before[work.pop()] - found
        found |= new
        work += new
    return found


def _is_of_bits(eqn) -> bool:
    known = primitives.of(eqn)
    return known.cheap or known.moves or known.name == "bitcast_convert_type"


def is_packed(eqn) -> bool:
    return primitives.is_named(eqn) and eqn.params["name"] == PACKED


def _draws(eqn) -> bool:
    by_place = primitives.is_random_bits(eqn) and draws_by_place(eqn)
    return by_place or eqn.primitive.name == "threefry2x32"


def _is_small(v) -> bool:
    """Whether it is kept and read, and not made anew."""
    is_key = jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key)
    return is_key or elements(v.aval.shape) == 1


def with_private_masks(closed):
    """The jaxpr in which every user of a mask makes it for itself."""
    jaxpr = jaxprs.split(closed)[0]
    eqns, of_bits = jaxpr.eqns, drawn(jaxpr.eqns)
    # what is there as a whole in the end is drawn once, and all read it
    alone = from_nothing(eqns) | of_bits - _makers(eqns, of_bits, jaxpr.outvars)
    maker = {v: i for i in alone for v in eqns[i].outvars}
    if not maker:
        return closed
    given: dict[Any, Any] = {}

    def made(variables: Sequence[Any]) -> dict[Any, Any]:
        work, found = [maker[v] for v in variables if v in maker], set()
        while work:
            i = work.pop()
            if i not in found:
                found.add(i)
                operands = filter(is_var, eqns[i].invars)
                work += [maker[v] for v in operands if v in maker]
        fresh: dict[Any, Any] = {}
        read = lambda v: fresh[v] if v in fresh else given[v]
        for i in sorted(found):
            args = [read(v) if is_var(v) else v.val for v in eqns[i].invars]
            outs = _compat.bind(eqns[i], args)
            fresh.update(zip(eqns[i].outvars, outs, strict=True))
        return fresh

    def rule(eqn, values: list) -> list[Any] | None:
        pairs = list(zip(eqn.invars, values, strict=True))
        given.update(pair for pair in pairs if is_var(pair[0]))
        if eqn.outvars and eqn.outvars[0] in maker:
            return None
        fresh = made(list(filter(is_var, eqn.invars)))
        args = [fresh.get(v, x) if is_var(v) else x for v, x in pairs]
        return _compat.bind(eqn, args)

    return _compat.without_dead_code(jaxprs.rewritten(closed, rule))


def _makers(eqns: Sequence[Any], chosen: set[int], outputs: Sequence[Any]) -> set[int]:
    """Of the chosen equations those that the outputs are made by, one after another."""
    needed = set(filter(is_var, outputs))
    found = set()
    for i in sorted(chosen, reverse=True):
        if needed.intersection(eqns[i].outvars):
            found.add(i)
            needed.update(filter(is_var, eqns[i].invars))
    return found


def with_shared_draws(closed):
    """The jaxpr in which equal masks of random bits are drawn once.

    `with_private_masks` undone, where no region has taken a mask.
    """
    eqns = jaxprs.split(closed)[0].eqns
    first: dict[Any, list[Any]] = {}
    # the bounds of a draw are made of nothing, for each draw
    small = (i for i in from_nothing(eqns) if all(map(_is_small, eqns[i].outvars)))
    again = {v for i in drawn(eqns).union(small) for v in eqns[i].outvars}

    def rule(eqn, values: list) -> list[Any] | None:
        if not eqn.outvars or eqn.outvars[0] not in again:
            return None
        pairs = zip(eqn.invars, values, strict=True)
        # the text of a literal does not say its type
        operands = tuple(id(x) if is_var(v) else (str(v), v.aval) for v, x in pairs)
        made = tuple(v.aval for v in eqn.outvars)
        same = eqn.primitive, operands, repr(eqn.params), made
        if same not in first:
            first[same] = _compat.bind(eqn, values)
        return first[same]

    return _compat.without_dead_code(jaxprs.rewritten(closed, rule))
