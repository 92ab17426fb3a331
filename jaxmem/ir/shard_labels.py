"""How arrays are sharded over devices by what is named for them, without a lowering.

From the shardings of inputs and from constraints the labels of `ir.placements` lead to
the arrays around them: axes that share a label are sharded alike. Where two axes of an
array could be sharded over one axis of the mesh, what is asked for has its way, then
indices, since they say which examples there are, then the largest array.

Tiles are taken so: of what XLA makes of a step (`ir.propagation`), a part must not
follow what XLA would rather not have done.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.jaxprs import elements, is_var
from jaxmem.ir.placements.propagate import Worklist
from jaxmem.ir.placements.rules import same_axis
from jaxmem.ir.shards import (
    InputShardings,
    Names,
    Shardings,
    Spec,
    asked_by,
    of_spec,
    whole,
)
from jaxmem.ir.types import Atom, Body, Jaxpr, JaxprEqn, Var


def labelled_shardings(closed: Body, given: InputShardings | None) -> Shardings:
    """How the arrays of a list of equations are sharded, from its inputs on."""
    return Shardings() if given is None else _Flow(closed, given).run()


def inner_shardings(eqn: JaxprEqn, body: Body, shardings: Shardings) -> Shardings:
    """How the arrays of a body of an equation are sharded, of one device in a map."""
    if primitives.is_scan(eqn):
        return labelled_shardings(body, shardings.body(eqn))
    takes = len(jaxprs.split(body)[0].invars)
    is_branch = primitives.is_branch(eqn) and takes == len(eqn.invars) - 1
    if is_branch or jaxprs.called(eqn) is not None:
        return labelled_shardings(body, shardings.inputs(eqn.invars[-takes:]))
    return Shardings()


class _Flow:
    """From arrays that are known to be sharded to those around them."""

    def __init__(self, closed: Body, given: InputShardings) -> None:
        self.found = Shardings(given.mesh)
        self.eqns: Sequence[Any] = jaxprs.split(closed)[0].eqns
        self.around: dict[Any, list[int]] = {}
        for i, eqn in enumerate(self.eqns):
            for v in dict.fromkeys(filter(is_var, [*eqn.invars, *eqn.outvars])):
                self.around.setdefault(v, []).append(i)
        self.work = Worklist()  # what is asked for first, then indices, the largest
        self.bodies: set[int] = set()  # equations whose bodies are to be looked at
        self.inside: dict[Any, Shardings] = {}
        for eqn in self.eqns:
            if (sharding := asked_by(eqn)) is not None:
                (v,) = eqn.outvars
                self.merge(v, of_spec(sharding, v), asked=True)
        for v, spec in zip(jaxprs.split(closed)[0].invars, given.of, strict=True):
            self.merge(v, spec)

    def run(self) -> Shardings:
        for thing in self.work:
            if thing in self.bodies:
                self.bodies.remove(thing)
                self.look_into(self.eqns[thing])
                continue
            for i in self.around.get(thing, ()):
                self.follow(i, thing)
        return self.found

    def merge(self, atom: Atom, spec: Spec, asked: bool = False) -> None:
        """An array is sharded, unless something else is known of it."""
        if not is_var(atom):
            return
        known = self.found.of.get(atom, whole(atom))
        new = list(known)
        for axis, names in enumerate(spec):
            taken = set(itertools.chain(*new))
            divided = atom.aval.shape[axis] % self.found.size(names) == 0
            if names and not new[axis] and divided and taken.isdisjoint(names):
                new[axis] = names
        if new != [*known]:
            self.found.of[atom] = tuple(new)
            self.work.push((not asked, *_rank(atom)), atom)

    def give(self, atom: Atom, axis: int, names: Names) -> None:
        if is_var(atom) and not self.found.names(atom, axis):
            self.merge(atom, (*[()] * axis, names))

    def follow(self, i: int, v: Var) -> None:
        """What an equation makes of what is known of one of its arrays."""
        eqn = self.eqns[i]
        if primitives.is_constraint(eqn):
            self.constrain(eqn)
        elif primitives.is_scan(eqn) or jaxprs.called(eqn) is not None:
            if i not in self.bodies:  # when nothing else is left
                self.bodies.add(i)
                self.work.push((2, i, 0), i)
        else:
            self.tell(eqn, v)

    def constrain(self, eqn: JaxprEqn) -> None:
        (x,), (y,) = eqn.invars, eqn.outvars
        self.merge(x, self.found.of.get(y, ()))
        for axis in eqn.params["unconstrained_dims"]:
            self.give(y, axis, self.found.names(x, axis))

    def tell(self, eqn: JaxprEqn, source) -> None:
        """To each axis that shares a label with one of `source`: sharded alike."""
        atoms = [*eqn.invars, *eqn.outvars]
        k = next(k for k, atom in enumerate(atoms) if atom is source)
        for axis, names in enumerate(self.found.of[source]):
            same = same_axis(eqn, k, axis, self.found.size(names)) if names else None
            for atom, place in zip(atoms, same or (), strict=False):
                if place is not None:
                    self.give(atom, place, names)

    def look_into(self, eqn: JaxprEqn) -> None:
        """Into a body and out of it."""
        is_scan = primitives.is_scan(eqn)
        body = eqn.params["jaxpr"] if is_scan else jaxprs.called(eqn)
        jaxpr = jaxprs.split(body)[0]
        shardings = (self.found.of.get(v, ()) if is_var(v) else () for v in eqn.invars)
        pairs = zip(shardings, eqn.invars, jaxpr.invars, strict=True)
        given = tuple(_inner(s, v, w) for s, v, w in pairs)
        key = id(body), given
        if key not in self.inside:
            of = InputShardings(self.found.mesh, given)
            self.inside[key] = labelled_shardings(body, of)
        inside = self.inside[key]
        if is_scan:
            self.carry(eqn, inside, jaxpr)
        own, inner = (*eqn.invars, *eqn.outvars), (*jaxpr.invars, *jaxpr.outvars)
        for v, w in zip(own, inner, strict=True):
            if is_var(w):
                self.merge(v, _outer(inside.of.get(w, ()), v, w))

    def carry(self, eqn: JaxprEqn, inside: Shardings, jaxpr: Jaxpr) -> None:
        """What is carried is sharded alike in each iteration."""
        consts, carries = _compat.scan_counts(eqn)
        for k in range(carries):
            before, after = eqn.invars[consts + k], eqn.outvars[k]
            for w in (jaxpr.invars[consts + k], jaxpr.outvars[k]):
                if is_var(w):
                    self.merge(after, inside.of.get(w, ()))
            self.merge(before, self.found.of.get(after, ()))
        given = (inside.of.get(w, whole(w)) for w in jaxpr.invars)
        found = InputShardings(self.found.mesh, tuple(given))
        self.found.bodies[id(eqn)] = found


def _rank(v: Var) -> tuple[bool, int]:
    is_index = jnp.issubdtype(v.aval.dtype, jnp.integer)
    return not is_index, -elements(v.aval.shape)


def _inner(spec: Spec, v: Var, w: Var) -> Spec:
    """Of an operand inside of a body; of a stack, that of its rows."""
    if not spec:
        return whole(w)
    return spec[v.aval.ndim - w.aval.ndim :]


def _outer(spec: Spec, v: Var, w: Var) -> Spec:
    """Of an operand or output, from what is known inside."""
    return ((),) * (v.aval.ndim - w.aval.ndim) + spec if spec else ()
