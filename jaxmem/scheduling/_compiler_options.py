"""What XLA is told besides the options that a user names.

XLA:GPU fills each array that scanned layers stack, residuals and gradients, with zeros
before the loop writes every part of it. With an option of its own it does not.
"""

from collections.abc import Iterator
from typing import Any

import jax

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.memory.time.fills import OPTION

_SINCE = (0, 10, 2)  # of jax: the first whose XLA was seen to know the option


def with_defaults(options: dict[str, Any] | None, closed: Any) -> dict[str, Any] | None:
    """The options of a GPU's compile of a step; what the user says holds.

    XLA does not look at what a loop reads of an array that it has updated, which may be
    what it has not written yet, as in a decoder's cache: a step with such a loop has
    the zeros. Each module of a search is audited for it, too (`read_unwritten`).
    """
    if jax.__version_info__ < _SINCE or reads_updated(closed):
        return options
    return {OPTION: True} | (options or {})


def reads_updated(closed: Any) -> bool:
    """Whether a loop reads an array of which it has just updated a part."""
    return any(_reads(jaxpr, kept) for jaxpr, kept in _in_loops(closed))


def _in_loops(closed: Any) -> Iterator[tuple[Any, int]]:
    """(jaxpr, how many of its results are no rows of a stack) of what loops run."""
    waiting: list[tuple[Any, int | None]] = [(jaxprs.split(closed)[0], None)]
    while waiting:
        jaxpr, kept = waiting.pop()
        if kept is not None:
            yield jaxpr, kept
        for eqn in jaxpr.eqns:
            for body in map(jaxprs.split, jaxprs.bodies(eqn)):
                inner, count = body[0], len(body[0].outvars)
                if primitives.is_scan(eqn):
                    count = _compat.scan_counts(eqn)[1]
                inside = kept is not None or primitives.is_loop(eqn)
                waiting.append((inner, count if inside else None))


def _reads(jaxpr: Any, kept: int) -> bool:
    """Whether a part of an array from outside is updated in a jaxpr, and it is read."""
    updated = set()
    for operands, made in _updating(jaxpr):
        if not updated.isdisjoint(operands):
            return True
        updated |= made
    twice = any(jaxpr.outvars.count(v) > 1 for v in updated)
    return twice or not updated.isdisjoint(filter(jaxprs.is_var, jaxpr.outvars[kept:]))


def _updating(jaxpr: Any) -> Iterator[tuple[list[Any], set[Any]]]:
    """Of each equation what it reads, and its results if it updates an outer array.

    One that only shows an array, in another shape say, reads nothing. What a called
    function has updated is taken for one of all its results. Loops are on their own:
    XLA takes what one hands to another for read.
    """
    outside, updated = {*jaxpr.invars, *jaxpr.constvars}, set()
    for eqn in jaxpr.eqns:
        operands = [v for v in eqn.invars if jaxprs.is_var(v)]
        results, made = {*eqn.outvars}, set()
        if primitives.is_update(eqn) or primitives.is_scatter_set(eqn):
            array, *operands = operands or [None]
            made = results if array in outside | updated else set()
        elif primitives.of(eqn).shows:
            outside |= set() if outside.isdisjoint(operands) else results
            made = set() if updated.isdisjoint(operands) else results
            operands = []
        elif not primitives.is_loop(eqn):
            called = (jaxprs.split(body)[0] for body in jaxprs.bodies(eqn))
            made = results if any(map(_updates_outside, called)) else set()
        updated |= made
        yield operands, made


def _updates_outside(jaxpr: Any) -> bool:
    return any(made for _, made in _updating(jaxpr))
