"""Over which axes of a mesh the axes of arrays are spread, as far as it can be told.

XLA partitions a step from the shardings of its arguments and from constraints. From
these the labels of `ir.axis_labels` lead to the arrays around them: axes that share a
label are spread alike. Nothing is compiled to know. Where two axes of an array could be
spread over one axis of the mesh, what is asked for has its way, then indices, since
they say which examples there are, then the largest array.

A mistake changes no value: a part that is taken from every shard of an axis that has no
shards is another part of it.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.ir.axis_labels import labels
from jaxmem.ir.flatten import is_explicit
from jaxmem.ir.jaxprs import elements, is_var
from jaxmem.ir.label_rules import CONSTRAINT, Labels, constraint

Names = tuple[str, ...]  # of axes of the mesh; empty for an axis that is whole
Spread = tuple[Names, ...]  # of the axes of an array


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
    """How a jaxpr's inputs are spread under these shardings; None if nothing is known.

    Args:
      closed: a step.
      shardings: one for each input, None where it is not known; or none at all.
    """
    invars = jaxprs.split(closed)[0].invars
    given = [_named(s) for s in shardings or [None] * len(invars)]
    asked = [_asked(eqn) for eqn in jaxprs.walk(closed)]
    meshes = [s.mesh for s in (*given, *asked) if s is not None]
    if len({tuple(mesh.shape.items()) for mesh in meshes}) != 1:
        return None  # of two, neither is that of the step
    pairs = zip(invars, given, strict=True)
    spreads = (_whole(v) if s is None else _of_spec(s, v) for v, s in pairs)
    return InputSpreads(meshes[0], tuple(spreads))


def _named(sharding) -> jax.NamedSharding | None:
    is_named = isinstance(sharding, jax.NamedSharding) and not is_explicit(sharding)
    return sharding if is_named else None


def _asked(eqn) -> jax.NamedSharding | None:
    """What a constraint asks for."""
    is_constraint = eqn.primitive.name == CONSTRAINT
    return _named(eqn.params["sharding"]) if is_constraint else None


def is_typed(atom, axis: int) -> bool:
    """Whether an axis is spread in the type of its array: on a mesh of explicit axes.

    JAX then wants to be told how each slice of it is spread.
    """
    sharding = getattr(atom.aval, "sharding", None)
    return sharding is not None and sharding.spec[axis] is not None


def _of_spec(sharding, v) -> Spread:
    def names(entry) -> Names:
        if entry is None or entry is PartitionSpec.UNCONSTRAINED:
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
      bodies: of the inputs of each scan's body, by the equation's identity.
    """

    mesh: Any = None
    of: dict[Any, Spread] = field(default_factory=dict)
    bodies: dict[int, InputSpreads] = field(default_factory=dict)

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
        return self.bodies.get(id(eqn))


def spreads_in(closed, given: InputSpreads | None) -> Spreads:
    """How the arrays of a list of equations are spread, from its inputs on."""
    return Spreads() if given is None else _Flow(closed, given).run()


class _Flow:
    """From arrays that are known to be spread to those around them."""

    def __init__(self, closed, given: InputSpreads):
        self.found = Spreads(given.mesh)
        self.eqns: Sequence[Any] = jaxprs.split(closed)[0].eqns
        self.around: dict[Any, list[int]] = {}
        for i, eqn in enumerate(self.eqns):
            for v in dict.fromkeys(filter(is_var, [*eqn.invars, *eqn.outvars])):
                self.around.setdefault(v, []).append(i)
        self.order = itertools.count()
        self.work: list[tuple] = []  # a heap: what is asked for, indices, the largest
        self.bodies: set[int] = set()  # equations whose bodies are to be looked at
        self.inside: dict[Any, Spreads] = {}
        for eqn in self.eqns:
            if (sharding := _asked(eqn)) is not None:
                (v,) = eqn.outvars
                self.merge(v, _of_spec(sharding, v), asked=True)
        for v, spread in zip(jaxprs.split(closed)[0].invars, given.of, strict=True):
            self.merge(v, spread)

    def run(self) -> Spreads:
        while self.work or self.bodies:
            if not self.work:
                i = min(self.bodies)
                self.bodies.remove(i)
                self.look_into(self.eqns[i])
                continue
            *_, v = heapq.heappop(self.work)
            for i in self.around.get(v, ()):
                self.follow(i, v)
        return self.found

    def merge(self, atom, spread: Spread, asked: bool = False) -> None:
        """An array is spread, unless something else is known of it."""
        if not is_var(atom):
            return
        known = self.found.of.get(atom, _whole(atom))
        new = list(known)
        for axis, names in enumerate(spread):
            taken = set(itertools.chain(*new))
            divided = atom.aval.shape[axis] % self.found.size(names) == 0
            if names and not new[axis] and divided and taken.isdisjoint(names):
                new[axis] = names
        if new != [*known]:
            self.found.of[atom] = tuple(new)
            heapq.heappush(self.work, (not asked, *_rank(atom), next(self.order), atom))

    def give(self, atom, axis: int, names: Names) -> None:
        if is_var(atom) and not self.found.names(atom, axis):
            self.merge(atom, (*[()] * axis, names))

    def follow(self, i: int, v) -> None:
        """What an equation makes of what is known of one of its arrays."""
        eqn = self.eqns[i]
        if eqn.primitive.name == CONSTRAINT:
            self.constrain(eqn)
        elif eqn.primitive.name == "scan" or _called(eqn) is not None:
            self.bodies.add(i)
        else:
            self.tell(eqn, v)

    def constrain(self, eqn) -> None:
        (x,), (y,) = eqn.invars, eqn.outvars
        self.merge(x, self.found.of.get(y, ()))
        for axis in eqn.params["unconstrained_dims"]:
            self.give(y, axis, self.found.names(x, axis))

    def tell(self, eqn, source) -> None:
        """To each axis that shares a label with one of `source`: it is spread alike."""
        for axis, names in enumerate(self.found.of[source]):
            table = labels(eqn, self.found.size(names)) if names else None
            if not isinstance(table, Labels):
                continue
            atoms, of_axes = [*eqn.invars, *eqn.outvars], [*table.ins, *table.outs]
            label = of_axes[next(k for k, a in enumerate(atoms) if a is source)][axis]
            for atom, of_axis in zip(atoms, of_axes, strict=True):
                if label is not None and label in of_axis:
                    self.give(atom, of_axis.index(label), names)

    def look_into(self, eqn) -> None:
        """Into a body and out of it."""
        is_scan = eqn.primitive.name == "scan"
        body = eqn.params["jaxpr"] if is_scan else _called(eqn)
        jaxpr = jaxprs.split(body)[0]
        spreads = (self.found.of.get(v, ()) if is_var(v) else () for v in eqn.invars)
        pairs = zip(spreads, eqn.invars, jaxpr.invars, strict=True)
        given = tuple(_inner(s, v, w) for s, v, w in pairs)
        key = id(body), given
        if key not in self.inside:
            of = InputSpreads(self.found.mesh, given)
            self.inside[key] = spreads_in(body, of)
        inside = self.inside[key]
        if is_scan:
            self.carry(eqn, inside, jaxpr)
        own, inner = (*eqn.invars, *eqn.outvars), (*jaxpr.invars, *jaxpr.outvars)
        for v, w in zip(own, inner, strict=True):
            if is_var(w):
                self.merge(v, _outer(inside.of.get(w, ()), v, w))

    def carry(self, eqn, inside: Spreads, jaxpr) -> None:
        """What is carried is spread alike in each iteration."""
        consts, carries = _compat.scan_counts(eqn)
        for k in range(carries):
            before, after = eqn.invars[consts + k], eqn.outvars[k]
            for w in (jaxpr.invars[consts + k], jaxpr.outvars[k]):
                if is_var(w):
                    self.merge(after, inside.of.get(w, ()))
            self.merge(before, self.found.of.get(after, ()))
        given = (inside.of.get(w, _whole(w)) for w in jaxpr.invars)
        found = InputSpreads(self.found.mesh, tuple(given))
        self.found.bodies[id(eqn)] = found


def _rank(v) -> tuple[bool, int]:
    is_index = jnp.issubdtype(v.aval.dtype, jnp.integer)
    return not is_index, -elements(v.aval.shape)


def _called(eqn) -> Any:
    """The body of a call, whose inputs and outputs are those of the equation."""
    inside = jaxprs.bodies(eqn)
    if len(inside) != 1 or eqn.primitive.name in ("scan", "while", "shard_map"):
        return None
    jaxpr = jaxprs.split(inside[0])[0]
    counts = len(jaxpr.invars), len(jaxpr.outvars)
    return inside[0] if counts == (len(eqn.invars), len(eqn.outvars)) else None


def _inner(spread: Spread, v, w) -> Spread:
    """Of an operand inside of a body; of a stack, that of its rows."""
    if not spread:
        return _whole(w)
    return spread[v.aval.ndim - w.aval.ndim :]


def _outer(spread: Spread, v, w) -> Spread:
    """Of an operand or output, from what is known inside."""
    return ((),) * (v.aval.ndim - w.aval.ndim) + spread if spread else ()


def held_labels(eqn, shards: int) -> Labels:
    """Of a constraint on an array of which parts are taken from each of its shards.

    A constraint that spreads an axis holds for such a part as it does for the array, if
    it does not ask for more shards than there are.
    """
    (own,), _, _ = table = constraint(eqn, shards)
    sharding = _asked(eqn)
    if sharding is None or eqn.params["layout"] is not None:
        return table
    spread = _of_spec(sharding, eqn.outvars[0])
    sizes = (math.prod(sharding.mesh.shape[n] for n in names) for names in spread)
    fits = (size > 1 and shards % size == 0 for size in sizes)
    pairs = enumerate(zip(own, fits, strict=True))
    held = tuple(d if label is None and ok else label for d, (label, ok) in pairs)
    return Labels((held,), (held,))


def constrained(eqn, x, axis: int | None):
    """A constraint on a slice of one shard along an axis: the others are spread."""
    params = dict(eqn.params)
    sharding = params["sharding"]
    if axis is not None and axis < len(sharding.spec):
        names = list(sharding.spec)
        names[axis] = None
        params["sharding"] = sharding.update(spec=PartitionSpec(*names))
    (y,) = _compat.bind(eqn, [x], params)
    return y


def held(x, mesh, spread: Spread):
    """An array, constrained to be spread so."""
    spec = PartitionSpec(*(names or None for names in spread))
    return jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, spec))
