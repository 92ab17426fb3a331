"""A step on a mesh of explicit axes, as the same step on one of Auto axes.

On explicit axes each array's type says how it is sharded (`float32[32@data,64]`), and
JAX checks each operation against that. Of a part, a row or a layer of an array most
types would be wrong. So the types are taken off, as `jax.sharding.auto_axes` does: what
they say that operations do not becomes a constraint. At its ends the step has the types
that it had.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.flatten import full_spec
from jaxmem.ir.jaxprs import is_explicit
from jaxmem.ir.placements.rules import same_axis
from jaxmem.ir.primitives import Kind
from jaxmem.ir.shards import Names, Spec, names_of, said_by, with_auto
from jaxmem.ir.types import Body, ClosedJaxpr, JaxprEqn


@dataclass(frozen=True)
class ExplicitTypes:
    """What the types of a step said.

    Attributes:
      mesh: of its arrays.
      outs: the types of its results.
    """

    mesh: AbstractMesh
    outs: tuple[Any, ...]

    def run(self, closed: ClosedJaxpr, leaves: Sequence[Any]) -> list[Any]:
        """A step without types, on arrays that have them, and so have its results."""
        with _mesh(with_auto(self.mesh)):
            outs = jaxprs.evaluate(closed, [*map(_untyped, leaves)])
        pairs = zip(outs, self.outs, strict=True)
        return [self._typed(x, aval) for x, aval in pairs]

    def _typed(self, x: Any, aval: Any) -> Any:
        mesh = aval.sharding.mesh
        if not (mesh.empty or is_explicit(aval.sharding)):
            return x  # of a step that has explicit axes inside alone
        spec = PartitionSpec(*(names or None for names in said_by(aval)))
        with _mesh(self.mesh):
            return jax.sharding.reshard(x, spec)


_mesh = jax.sharding.use_abstract_mesh


def on_auto_axes() -> contextlib.AbstractContextManager:
    """A context in which a step without types is traced, and looked at.

    Whatever `jax.set_mesh` says of axes: what is made there has no such type either.
    """
    mesh = jax.sharding.get_abstract_mesh()
    is_typed = AxisType.Explicit in mesh.axis_types
    return _mesh(with_auto(mesh)) if is_typed else contextlib.nullcontext()


def explicit_types(closed: ClosedJaxpr) -> ExplicitTypes | None:
    """What the types of a jaxpr say; None where it is on no explicit axes."""
    made = (v for eqn in jaxprs.walk(closed) for v in eqn.outvars)
    variables = itertools.chain(jaxprs.split(closed)[0].invars, made)
    shardings: Iterator[Any] = (getattr(v.aval, "sharding", None) for v in variables)
    typed = (s for s in shardings if s is not None and is_explicit(s))
    mesh = next((s.mesh for s in typed), None)
    if mesh is None:
        return None
    return ExplicitTypes(mesh, tuple(closed.out_avals))


def without_types(closed: ClosedJaxpr, types: ExplicitTypes | None) -> ClosedJaxpr:
    """The jaxpr on Auto axes; as it is where there are no explicit ones."""
    if types is None:
        return closed
    with _mesh(with_auto(types.mesh)):
        return _without(closed)


def _without(body: Body) -> ClosedJaxpr:
    """A body in the mesh of this context."""
    jaxpr, constants = jaxprs.split(body)

    def run(*args: Any) -> list[Any]:
        own = _compat.ClosedJaxpr(jaxpr, [*map(_untyped, constants)])
        return jaxprs.evaluate(own, args, _rule)

    with _compat.no_leak_check():
        return jax.make_jaxpr(run)(*(_plain(v.aval) for v in jaxpr.invars))


def _plain(aval: Any) -> Any:
    """The type of an array, sharded over no axis of the mesh of this context."""
    if not isinstance(aval, jax.core.ShapedArray):
        return aval
    mesh = jax.sharding.get_abstract_mesh()
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * aval.ndim))
    return aval.update(sharding=sharding)


def _untyped(x: Any) -> Any:
    """An array where it is, in the mesh of this context, which has no explicit axes."""
    return jax.sharding.reshard(x, PartitionSpec(*[None] * jnp.ndim(x)))


# -- one equation

# Beside calls: of these the equations inside have types.
_NESTED = Kind.LOOP, Kind.BRANCH, Kind.SOLVE
# What is made of numbers alone is sharded as it is read.
_OF_NUMBERS = Kind.CREATION, Kind.RANDOM, Kind.KEY


def _rule(eqn: JaxprEqn, args: list) -> list[Any]:
    known = primitives.of(eqn)
    if primitives.is_reshard(eqn):
        return [_held(eqn, args[0])]
    if primitives.is_shard_map(eqn):
        return _mapped(eqn, args)
    bare = _bare(eqn)
    if (known.calls or known.kind in _NESTED) and jaxprs.bodies(eqn):
        return jaxprs.rebind(bare, args, [_without(b) for b in jaxprs.bodies(eqn)])
    outs = _compat.bind(bare, args)
    if known.kind in _OF_NUMBERS or primitives.is_broadcast(eqn) or len(outs) > 1:
        return outs
    return [_held(eqn, outs[0])]


def _mapped(eqn: JaxprEqn, args: list) -> list[Any]:
    """A `shard_map` over the same axes, the others Auto ones."""
    (body,) = jaxprs.bodies(eqn)
    run = lambda shards: jaxprs.evaluate(body, shards, _rule)
    return _compat.shard_map_again(_bare(eqn), run, args)


def _bare(eqn: JaxprEqn) -> Any:
    """The equation in the mesh of this context, which names no type of its result."""
    params = {name: _with_auto(value) for name, value in eqn.params.items()}
    if primitives.is_constraint(eqn):
        # JAX lowers it with what the type says besides
        params["sharding"] = _with_type(params["sharding"], eqn.outvars[0].aval)
    else:
        named = {"sharding", "out_sharding"} & params.keys()
        params |= dict.fromkeys(named)
    return _compat.in_mesh(eqn, jax.sharding.get_abstract_mesh()).replace(params=params)


def _with_auto(value: Any) -> Any:
    """A parameter: each mesh in it has Auto axes for the explicit ones."""
    if isinstance(value, Mesh | AbstractMesh):
        return with_auto(value)
    if isinstance(value, NamedSharding):
        mesh = with_auto(value.mesh)
        return NamedSharding(mesh, value.spec, memory_kind=value.memory_kind)
    if type(value) is tuple and any(map(is_explicit, value)):
        return tuple(map(_with_auto, value))
    return value


def _with_type(sharding: Any, aval: Any) -> Any:
    if not isinstance(sharding, NamedSharding):
        return sharding
    pairs = zip(full_spec(sharding, aval.ndim), said_by(aval), strict=True)
    spec = [(*names, *names_of(entry)) if names else entry for entry, names in pairs]
    return sharding.update(spec=PartitionSpec(*spec))


def _held(eqn: JaxprEqn, x: Any) -> Any:
    """What an equation makes, constrained as its type says if nothing else says it."""
    aval = eqn.outvars[0].aval
    if not is_explicit(getattr(aval, "sharding", None)):
        return x
    spec, followed = said_by(aval), _followed(eqn)
    # else XLA may have a product gathered along the examples, not the weights
    is_chosen = primitives.is_product(eqn) and any(spec)
    if spec == followed and not is_chosen:
        return x
    mesh = jax.sharding.get_abstract_mesh()
    is_mixed = AxisType.Auto in aval.sharding.mesh.axis_types
    # over axes that have been Auto all along XLA may shard what it likes
    free = PartitionSpec.UNCONSTRAINED if is_mixed else None
    pairs = zip(spec, followed or spec, strict=True)
    entries = (names or (None if old else free) for names, old in pairs)
    sharding = NamedSharding(mesh, PartitionSpec(*entries))
    return jax.lax.with_sharding_constraint(x, sharding)


def _followed(eqn: JaxprEqn) -> Spec | None:
    """How a result is sharded by its operands; None where that is not known."""
    if primitives.is_reshard(eqn):
        (source,) = eqn.invars
        known = source.aval.ndim == 0 or is_explicit(source.aval.sharding)
        return said_by(source.aval) if known else None
    (out,), bare = eqn.outvars, _bare(eqn)
    found: list[Names] = [()] * out.aval.ndim
    for k, v in enumerate(eqn.invars):
        for axis, names in enumerate(said_by(v.aval)):
            sizes = (v.aval.sharding.mesh.shape[name] for name in names)
            n = math.prod(sizes)
            same = same_axis(bare, k, axis, n) if names else None
            place = None if same is None else same[len(eqn.invars)]
            if place is None:
                continue
            if found[place] not in ((), names):
                return None
            found[place] = names
    every = [*itertools.chain(*found)]
    return tuple(found) if len(every) == len({*every}) else None
