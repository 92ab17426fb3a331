"""Loops that do what others do besides: they are taken from these.

A loop that is taken apart is done once for its carries and, where a part of a body
around it makes its stacks, once for these. What nobody reads of each is gone by then,
so they no longer look alike.
"""

from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import JaxprGraph, Values, done_otherwise
from jaxmem.ir.scans import is_var, split
from jaxmem.ir.types import ClosedJaxpr, Jaxpr, JaxprEqn


def loops_once(closed: ClosedJaxpr) -> Any:
    """The jaxpr without scans of which another has all results, and more."""
    graph = JaxprGraph(closed)
    instead = {}
    for i, j in _pairs(graph):
        found = None if i in instead or j in instead else _found_in(graph, i, j)
        if found is not None:
            instead[i] = partial(_read, found)
    return done_otherwise(closed, graph, instead) if instead else closed


def _read(variables: Sequence[Any], values: Values) -> list[Any]:
    return [values.read(v) for v in variables]


def _pairs(graph: JaxprGraph) -> Iterator[tuple[int, int]]:
    """(loop, one with more results) from the same first carries, in as many turns."""
    alike: dict[Hashable, list[int]] = {}
    for i, eqn in enumerate(graph.eqns):
        if primitives.is_scan(eqn) and not _compat.has_side_effects(eqn):
            alike.setdefault(_turns(eqn), []).append(i)
    outs = lambda i: len(graph.eqns[i].outvars)
    for found in alike.values():
        yield from ((i, j) for i in found for j in found if outs(i) < outs(j))


def _turns(eqn: JaxprEqn) -> Hashable:
    how = (eqn.params[k] for k in ("length", "reverse", "unroll"))
    return (*how, *map(_atom, split(eqn, eqn.invars)[1]))


def _found_in(graph: JaxprGraph, i: int, j: int) -> list[Any] | None:
    """The results of loop j that are those of loop i; None where one is missing."""
    one, other = graph.eqns[i], graph.eqns[j]
    # what waits for a loop cannot be read in its place
    if i in graph.cone(filter(is_var, other.invars)):
        return None
    counts = [_compat.scan_counts(eqn)[1] for eqn in (one, other)]
    numbers: dict[Hashable, int] = {}
    ours, theirs = (_numbered(eqn, numbers) for eqn in (one, other))
    ends = counts[0]
    # a carry is the same where all that it may be made of is
    if ours[:ends] != theirs[:ends] or counts[0] != counts[1]:
        return None
    rows = dict(zip(theirs[ends:], other.outvars[ends:], strict=True))
    if not rows.keys() >= {*ours[ends:]}:
        return None
    return [*other.outvars[:ends], *(rows[n] for n in ours[ends:])]


def _numbered(eqn: JaxprEqn, numbers: dict[Hashable, int]) -> list[int]:
    """Of each result of a scan's body a number: the same for the same computation."""
    body = JaxprGraph(eqn.params["jaxpr"])
    consts, carries, xs = split(eqn, eqn.invars)
    number = lambda key: numbers.setdefault(key, len(numbers))
    keys = [
        *(("const", _atom(v)) for v in consts),
        *(("carry", k) for k in range(len(carries))),
        *(("row", _atom(v)) for v in xs),
    ]
    known = dict(zip(body.arguments, map(number, keys), strict=True))
    # constants of a trace are the same only as objects
    known |= {v: number(("closed over", id(x))) for v, x in body.constants.items()}
    read = lambda v: known[v] if is_var(v) else number(("literal", _atom(v)))
    for one in body.eqns:
        made = one.primitive, _params(one), tuple(map(read, one.invars))
        for k, v in enumerate(one.outvars):
            known[v] = number((*made, k))
    return list(map(read, body.outvars))


def _params(eqn: JaxprEqn) -> Hashable:
    """What tells two equations of a primitive apart, operands excepted."""
    # a number of its own: it is like no other
    if _compat.has_side_effects(eqn):
        return id(eqn)
    if any(map(_holds_constants, jaxprs.bodies(eqn))):  # their text leaves these out
        return id(eqn)
    text = lambda x: str(x) if jaxprs.is_body(x) else x
    found = tuple((k, text(v)) for k, v in sorted(eqn.params.items()))
    try:
        hash(found)
    except TypeError:
        return id(eqn)
    return found


def _holds_constants(body: Jaxpr) -> bool:
    inner = (one for eqn in jaxprs.walk(body) for one in jaxprs.bodies(eqn))
    return any(jaxprs.split(one)[1] for one in (body, *inner))


def _atom(atom: Any) -> Hashable:
    if is_var(atom):
        return atom
    value = np.asarray(atom.val)
    return str(atom.aval), value.tobytes()
