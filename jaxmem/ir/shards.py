"""Over which axes of a mesh the axes of arrays are sharded.

`ir.propagation` finds it for all arrays of a list of equations as XLA has it, and
`ir.shard_labels` as it is asked for. A mistake changes no value: a part that is taken
from every shard of an axis that has no shards is another part of it.
"""

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.jaxprs import is_explicit, is_var
from jaxmem.ir.placements.labels import Labels, constraint
from jaxmem.ir.scans import kept_size, size_of, split
from jaxmem.ir.types import Atom, Body, JaxprEqn, Var

Names = tuple[str, ...]  # of axes of the mesh; empty for an axis that is whole
Spec = tuple[Names, ...]  # of the axes of an array


@dataclass(frozen=True)
class InputShardings:
    """How the inputs of a list of equations are sharded.

    Attributes:
      mesh: what their shardings, and those of all constraints, are of.
      of: one for each input.
    """

    mesh: Any
    of: tuple[Spec, ...]


def of_shardings(closed: Body, shardings: Sequence[Any]) -> InputShardings | None:
    """How a jaxpr's inputs are sharded under these shardings; None if nothing is known.

    Args:
      closed: a step.
      shardings: one for each input, None where it is not known; or none at all.
    """
    invars = jaxprs.split(closed)[0].invars
    given = [named_sharding(s) for s in shardings or [None] * len(invars)]
    asked = [asked_by(eqn) for eqn in jaxprs.walk(closed)]
    meshes = [s.mesh for s in (*given, *asked) if s is not None]
    if len({tuple(mesh.shape.items()) for mesh in meshes}) != 1:
        return None  # of two, neither is that of the step
    if meshes[0].size == 1:
        return None  # each array is whole, and calls for one chip stay as they are
    pairs = zip(invars, given, strict=True)
    specs = (whole(v) if s is None else of_spec(s, v) for v, s in pairs)
    return InputShardings(meshes[0], tuple(specs))


def named_sharding(sharding: Any) -> jax.NamedSharding | None:
    """One that XLA is told, on Auto axes: a step on explicit ones is seen without."""
    if not is_explicit(sharding):
        return sharding if isinstance(sharding, jax.NamedSharding) else None
    return sharding.update(mesh=with_auto(sharding.mesh))


def with_auto(mesh: Any) -> Any:
    """A mesh with Auto axes for the explicit ones."""
    auto, kinds = AxisType.Auto, mesh.axis_types
    new = tuple(auto if kind is AxisType.Explicit else kind for kind in kinds)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=new)
    return mesh.update_axis_types(dict(zip(mesh.axis_names, new, strict=True)))


def said_by(aval: Any) -> Spec:
    """How an array is sharded by its type: over explicit axes."""
    sharding: Any = getattr(aval, "sharding", None)
    if not is_explicit(sharding):
        return ((),) * getattr(aval, "ndim", 0)
    return tuple(map(names_of, sharding.spec))


def asked_by(eqn: JaxprEqn) -> jax.NamedSharding | None:
    """What a constraint asks for."""
    if not primitives.is_constraint(eqn):
        return None
    return named_sharding(eqn.params["sharding"])


def names_of(entry: Any) -> Names:
    """Of one axis in a `PartitionSpec`."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def of_spec(sharding: Any, v: Var) -> Spec:
    """Of an array under a sharding."""
    found = tuple(map(names_of, sharding.spec))
    return found + ((),) * (v.aval.ndim - len(found))


def whole(v: Var) -> Spec:
    """Of an array that each device has all of."""
    return ((),) * getattr(v.aval, "ndim", 0)


@dataclass
class Shardings:
    """How the arrays of a list of equations are sharded.

    Attributes:
      mesh: None where nothing is known.
      of: of variables; the others are whole on each device.
      bodies: of the inputs of a scan's body, by the equation's identity, where more is
        known of them than of the scan's own.
      sent: (equation, bytes that a device sends for it), by the equation's identity.
    """

    mesh: Any = None
    of: dict[Any, Spec] = field(default_factory=dict)
    bodies: dict[int, InputShardings] = field(default_factory=dict)
    sent: dict[int, tuple[Any, float]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def names(self, atom: Atom, axis: int) -> Names:
        """Over which axes of the mesh an axis of an array is sharded."""
        known = self.of.get(atom) if is_var(atom) else None
        return known[axis] if known else ()

    def count(self, atom: Atom, axis: int) -> int:
        """How many shards an axis has."""
        return self.size(self.names(atom, axis))

    def size(self, names: Names) -> int:
        """How many devices there are along axes of the mesh."""
        return math.prod(self.mesh.shape[name] for name in names) if names else 1

    def shards(self, atom: Atom, without: Names = ()) -> int:
        """How many parts an array is in; each device has one of them.

        `without`: axes of the mesh that are not counted.
        """
        known = itertools.chain(*self.of.get(atom, ())) if is_var(atom) else ()
        return self.size(tuple(name for name in known if name not in without))

    def bytes_of(self, atom: Atom) -> int:
        """Bytes of an array in the memory of one device."""
        return size_of(atom) // self.shards(atom)

    def kept_bytes_of(self, atom: Atom) -> float:
        """The same of an array as it is kept from the forward to the backward pass."""
        return kept_size(atom) / self.shards(atom)

    def workers(self, eqn: JaxprEqn, without: Collection[str] = ()) -> int:
        """How many devices share the work of an equation.

        `without`: axes of the mesh that are not counted.
        """
        atoms = filter(is_var, (*eqn.invars, *eqn.outvars))
        known = itertools.chain.from_iterable(self.of.get(v, ()) for v in atoms)
        names = dict.fromkeys(itertools.chain(*known))
        return self.size(tuple(name for name in names if name not in without))

    def partial_bytes(self, eqn: JaxprEqn) -> int:
        """Bytes of a device's product of shards, before it is summed over devices.

        It has all of the result where the axis of the mesh along which operands are
        summed is the one that the result is sharded over.
        """
        if not primitives.is_dot(eqn) or self.mesh is None:
            return 0
        (lhs, rhs), _ = eqn.params["dimension_numbers"]
        (out,) = eqn.outvars
        first, second = eqn.invars
        pairs = zip(lhs, rhs, strict=True)
        both = ({*self.names(first, a)} & {*self.names(second, b)} for a, b in pairs)
        own = itertools.chain(*self.of.get(out, ()))
        again = tuple({*itertools.chain(*both)} & {*own})
        return self.bytes_of(out) * self.size(again) if again else 0

    def inputs(self, atoms: Sequence[Any]) -> InputShardings | None:
        """How these are sharded, as the inputs of a list of equations."""
        if self.mesh is None:
            return None
        of = (self.of.get(v) if is_var(v) else None for v in atoms)
        pairs = zip(of, atoms, strict=True)
        return InputShardings(self.mesh, tuple(s or whole(v) for s, v in pairs))

    def body(self, eqn: JaxprEqn) -> InputShardings | None:
        """How the inputs of a scan's body, or of a branch, are sharded."""
        if id(eqn) in self.bodies:
            return self.bodies[id(eqn)]
        if self.mesh is not None and primitives.is_branch(eqn):
            return self.inputs(eqn.invars[1:])
        if self.mesh is None or not primitives.is_scan(eqn):
            return None
        consts, carry, xs = split(eqn, eqn.invars)
        # a carry is sharded as it comes out, where somebody reads that
        pairs = zip(eqn.outvars, carry, strict=False)
        carry = [out if out in self.of else v for out, v in pairs]
        found = self.inputs([*consts, *carry, *xs])
        assert found is not None  # there is a mesh
        rows = len(consts) + len(carry)  # what comes after them is sliced
        of = (s[k >= rows :] for k, s in enumerate(found.of))
        return InputShardings(found.mesh, tuple(of))


WHOLE = Shardings()  # each device has all of each array


def held_labels(eqn: JaxprEqn, shards: int) -> Labels:
    """Of a constraint on an array of which parts are taken from each of its shards.

    A constraint that shards an axis holds for such a part as it does for the array, if
    it does not ask for more shards than there are.
    """
    (own,), _, _ = table = constraint(eqn, shards)
    sharding = asked_by(eqn)
    if sharding is None or eqn.params["layout"] is not None:
        return table
    spec = of_spec(sharding, eqn.outvars[0])
    sizes = (math.prod(sharding.mesh.shape[n] for n in names) for names in spec)
    fits = (size > 1 and shards % size == 0 for size in sizes)
    pairs = enumerate(zip(own, fits, strict=True))
    held = tuple(d if label is None and ok else label for d, (label, ok) in pairs)
    return Labels((held,), (held,))


def constrained(eqn: JaxprEqn, x: Any, axis: int | None) -> Any:
    """A constraint on a slice of one shard along an axis: the others are sharded."""
    params = dict(eqn.params)
    sharding = params["sharding"]
    if axis is not None and axis < len(sharding.spec):
        names = list(sharding.spec)
        names[axis] = None
        params["sharding"] = sharding.update(spec=PartitionSpec(*names))
    (y,) = _compat.bind(eqn, [x], params)
    return y


def held(x: Any, mesh: Any, spec: Spec) -> Any:
    """An array, constrained to be sharded so."""
    return jax.lax.with_sharding_constraint(x, sharding_of(mesh, spec))


def sharding_of(mesh: Any, spec: Spec) -> jax.NamedSharding:
    """As JAX has it."""
    return jax.NamedSharding(mesh, PartitionSpec(*(names or None for names in spec)))
