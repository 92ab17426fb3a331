"""Over which axes of a mesh the axes of arrays are spread, as far as it can be told.

XLA partitions a step from the shardings of its arguments and from constraints. From
these the labels of `ir.axis_labels` lead to the arrays between them: axes that share a
label are spread alike. Nothing is compiled to know. Where two axes of an array could be
spread over one axis of the mesh, the larger operand has its way, and indices before all
else, as they say which examples there are.

A mistake changes no value: a part that is taken from every shard of an axis that has no
shards is another part of it.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.ir.axis_labels import labels
from jaxmem.ir.flatten import is_explicit
from jaxmem.ir.jaxprs import elements, is_var
from jaxmem.ir.label_rules import CONSTRAINT, Labels

Names = tuple[str, ...]  # of axes of the mesh; empty for an axis that is whole
Spread = tuple[Names, ...]  # of the axes of an array

_SWEEPS = 2  # forward and backward, over a list of equations


@dataclass(frozen=True)
class InputSpreads:
    """How the inputs of a list of equations are spread.

    Attributes:
      mesh: what their shardings, and those of all constraints, are of.
      of: one for each input.
    """

    mesh: Any
    of: tuple[Spread, ...]


def of_shardings(closed, shardings: Sequence[Any]) -> InputSpreads | None:
    """How a jaxpr's inputs are spread under these shardings; None if nothing is said.

    Args:
      closed: a step.
      shardings: one for each input, None where it is not known; or none at all.
    """
    invars = jaxprs.split(closed)[0].invars
    shardings = shardings or [None] * len(invars)
    asked = (e.params["sharding"] for e in jaxprs.walk(closed) if _is_constraint(e))
    named = [s for s in (*shardings, *asked) if _is_named(s)]
    meshes = {tuple(s.mesh.shape.items()) for s in named}
    if len(meshes) != 1:  # of two, neither is that of the step
        return None
    pairs = zip(invars, shardings, strict=True)
    spreads = (_of_spec(s, v) if _is_named(s) else _whole(v) for v, s in pairs)
    return InputSpreads(named[0].mesh, tuple(spreads))


def _is_named(sharding) -> bool:
    return isinstance(sharding, jax.NamedSharding) and not is_explicit(sharding)


def _is_constraint(eqn) -> bool:
    return eqn.primitive.name == CONSTRAINT


def _of_spec(sharding, v) -> Spread:
    def names(entry) -> Names:
        if entry is None or entry is jax.P.UNCONSTRAINED:
            return ()
        return entry if isinstance(entry, tuple) else (entry,)

    found = tuple(map(names, sharding.spec))
    return found + ((),) * (v.aval.ndim - len(found))


def _whole(v) -> Spread:
    return ((),) * getattr(v.aval, "ndim", 0)


@dataclass
class Spreads:
    """How the arrays of a list of equations are spread.

    Attributes:
      mesh: None where nothing is known.
      of: of variables; the others are not known to be spread.
    """

    mesh: Any = None
    of: dict[Any, Spread] = field(default_factory=dict)
    _bodies: dict[int, InputSpreads] = field(default_factory=dict)
    _seen: dict[Any, "Spreads"] = field(default_factory=dict)  # of bodies

    def names(self, atom, axis: int) -> Names:
        """Over which axes of the mesh an axis of an array is spread."""
        known = self.of.get(atom) if is_var(atom) else None
        return known[axis] if known else ()

    def count(self, atom, axis: int) -> int:
        """How many shards an axis has."""
        return self.size(self.names(atom, axis))

    def size(self, names: Names) -> int:
        """How many devices there are along axes of the mesh."""
        return math.prod(self.mesh.shape[name] for name in names)

    def body(self, eqn) -> InputSpreads | None:
        """How the inputs of a scan's body are spread."""
        return self._bodies.get(id(eqn))

    def _give(self, atom, axis: int, names: Names) -> None:
        """An axis is spread, unless something else is known of its array."""
        if not is_var(atom) or not names or self.names(atom, axis):
            return
        known = self.of.get(atom, _whole(atom))
        taken = set(itertools.chain(*known))
        if taken.isdisjoint(names) and atom.aval.shape[axis] % self.size(names) == 0:
            self.of[atom] = (*known[:axis], names, *known[axis + 1 :])

    def _merge(self, atom, spread: Spread) -> None:
        for axis, names in enumerate(spread):
            self._give(atom, axis, names)


def spreads_in(closed, given: InputSpreads | None) -> Spreads:
    """How the arrays of a list of equations are spread, from its inputs on."""
    if given is None:
        return Spreads()
    jaxpr = jaxprs.split(closed)[0]
    found = Spreads(given.mesh, dict(zip(jaxpr.invars, given.of, strict=True)))
    for _ in range(_SWEEPS):
        for eqn in jaxpr.eqns:
            _follow(found, eqn)
        for eqn in reversed(jaxpr.eqns):
            _follow(found, eqn)
    return found


def _follow(found: Spreads, eqn) -> None:
    """What one equation's operands and outputs tell each other."""
    if _is_constraint(eqn):
        _constrain(found, eqn)
    elif eqn.primitive.name == "scan":
        _through_scan(found, eqn)
    elif (body := _called(eqn)) is not None:
        _through(found, eqn, body, lambda v: found.of.get(v, _whole(v)))
    else:
        _along_labels(found, eqn)


def _constrain(found: Spreads, eqn) -> None:
    (x,), (y,) = eqn.invars, eqn.outvars
    if _is_named(eqn.params["sharding"]):
        found.of[y] = _of_spec(eqn.params["sharding"], y)
    if is_var(x):
        found._merge(x, found.of.get(y, _whole(y)))
    for axis in eqn.params["unconstrained_dims"]:
        found._give(y, axis, found.names(x, axis))


def held_labels(eqn, shards: int) -> Labels:
    """Of a constraint on an array of which parts are taken from each of its shards.

    A constraint that spreads an axis holds for such a part as it does for the array, if
    it does not ask for more shards than there are.
    """
    (own,), _, _ = table = labels(eqn, shards)
    sharding = eqn.params["sharding"]
    if not _is_named(sharding) or eqn.params["layout"] is not None:
        return table
    spread = _of_spec(sharding, eqn.outvars[0])
    sizes = (math.prod(sharding.mesh.shape[n] for n in names) for names in spread)
    fits = (size > 1 and shards % size == 0 for size in sizes)
    pairs = enumerate(zip(own, fits, strict=True))
    held = tuple(d if label is None and ok else label for d, (label, ok) in pairs)
    return Labels((held,), (held,))


def _along_labels(found: Spreads, eqn) -> None:
    for atom in sorted(filter(is_var, eqn.invars), key=_rank):
        _tell(found, eqn, atom)
    for v in eqn.outvars:
        _tell(found, eqn, v)


def _rank(atom) -> tuple[bool, int]:
    is_index = jnp.issubdtype(atom.aval.dtype, jnp.integer)
    return not is_index, -elements(atom.aval.shape)


def _tell(found: Spreads, eqn, source) -> None:
    """To each axis that shares a label with one of `source`: it is spread alike."""
    for axis, names in enumerate(found.of.get(source, ())):
        if not names:
            continue
        table = labels(eqn, found.size(names))
        if isinstance(table, Labels):
            label = _label_of(eqn, table, source, axis)
            for atom, place in _with_label(eqn, table, label):
                found._give(atom, place, names)


def _atoms(eqn, table: Labels) -> Iterator[tuple[Any, tuple]]:
    atoms, names = [*eqn.invars, *eqn.outvars], [*table.ins, *table.outs]
    return zip(atoms, names, strict=True)


def _label_of(eqn, table: Labels, source, axis: int) -> Any:
    return next(of[axis] for atom, of in _atoms(eqn, table) if atom is source)


def _with_label(eqn, table: Labels, label) -> Iterator[tuple[Any, int]]:
    for atom, of_axis in _atoms(eqn, table):
        for place, other in enumerate(of_axis):
            if label is not None and other == label:
                yield atom, place


def _called(eqn) -> Any:
    """The body of a call, whose inputs and outputs are those of the equation."""
    inside = jaxprs.bodies(eqn)
    if len(inside) != 1 or eqn.primitive.name in ("scan", "while", "shard_map"):
        return None
    jaxpr = jaxprs.split(inside[0])[0]
    counts = len(jaxpr.invars), len(jaxpr.outvars)
    return inside[0] if counts == (len(eqn.invars), len(eqn.outvars)) else None


def _through(found: Spreads, eqn, body, inner: Callable[[Any], Spread]) -> Spreads:
    """Into a body and out of it; `inner`: how an operand is spread inside."""
    jaxpr = jaxprs.split(body)[0]
    given = tuple(inner(v) if is_var(v) else _whole(v) for v in eqn.invars)
    key = id(body), given
    if key not in found._seen:
        found._seen[key] = spreads_in(body, InputSpreads(found.mesh, given))
    inside = found._seen[key]
    known = lambda v: inside.of.get(v, ()) if is_var(v) else ()
    for v, w in zip(eqn.invars, jaxpr.invars, strict=True):
        if is_var(v):
            found._merge(v, _outer(v, known(w)))
    for v, w in zip(eqn.outvars, jaxpr.outvars, strict=True):
        found._merge(v, _outer(v, known(w)))
    return inside


def _outer(v, spread: Spread) -> Spread:
    """Of a stack, from the spread of its rows."""
    return ((),) * (v.aval.ndim - len(spread)) + spread


def _through_scan(found: Spreads, eqn) -> None:
    body = eqn.params["jaxpr"]
    n_consts, n_carry = _compat.scan_counts(eqn)
    stacks = {v for v in eqn.invars[n_consts + n_carry :] if is_var(v)}
    carries = range(n_consts, n_consts + n_carry)

    def inner(v) -> Spread:
        spread = found.of.get(v, _whole(v))
        return spread[1:] if v in stacks else spread

    inside = _through(found, eqn, body, inner)
    jaxpr = jaxprs.split(body)[0]
    # what is carried is spread alike in each iteration
    for k, i in enumerate(carries):
        first, last = eqn.invars[i], eqn.outvars[k]
        found._merge(last, inside.of.get(jaxpr.invars[i], ()))
        if is_var(first):
            found._merge(first, found.of.get(last, ()))
    given = (inside.of.get(w, _whole(w)) for w in jaxpr.invars)
    found._bodies[id(eqn)] = InputSpreads(found.mesh, tuple(given))
