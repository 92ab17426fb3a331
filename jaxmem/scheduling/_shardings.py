"""A jitted step's own shardings: read off, and given to what is made of it.

`jax.jit(step, in_shardings=..., out_shardings=...)` traces to a call that names them.
The passes see its body; its arguments and results keep their shardings by the `jit`
that is made of the scheduled step, and by constraints on the results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.auto_axes import ExplicitTypes, explicit_types, without_types
from jaxmem.ir.flatten import (
    constrained,
    is_usual_memory,
    opened,
    typed_sharding,
    why_closed,
)
from jaxmem.ir.jaxprs import is_explicit
from jaxmem.ir.scans import is_var

Leaves = tuple[Any, ...]  # a sharding for each array; None where none is named


@dataclass(frozen=True)
class Placed(jaxprs.Traced):
    """A traced step without the shardings that it names for its own leaves."""

    ins: Leaves = ()  # of the arguments
    outs: Leaves = ()  # of the results
    types: ExplicitTypes | None = None  # of a step on explicit axes, without them here


def placed(traced: jaxprs.Traced, own: bool = True) -> Placed:
    """The step without types, and the shardings that a jitted function in it names.

    `own`: whether the step is one.
    """
    ins, outs = _named(traced.jaxpr) if own else ((), ())
    opened = _opened(traced.jaxpr) if any((*ins, *outs)) else traced.jaxpr
    types = explicit_types(opened)
    bare = without_types(opened, types)
    return Placed(bare, traced.leaves, traced.out_tree, ins, outs, types)


@dataclass(frozen=True, eq=False)  # one for each signature: compared by identity
class JitShardings:
    """Those that a jitted step names."""

    ins: Leaves = ()  # of the arguments' leaves
    outs: Leaves = ()  # of the results' leaves
    tree: Any = None  # of the arguments, positional ones and keywords
    out_tree: Any = None  # of the results

    def of(self, arguments: Any) -> Any:
        """The arguments' shapes and dtypes under these shardings."""
        # Not under those on a mesh of explicit axes: `jit` leaves types as they are.
        if not any(self.ins):
            return arguments
        leaves, tree = jax.tree.flatten(arguments)
        pairs = zip(leaves, self.ins, strict=True)
        placed = [x if s is None or is_explicit(s) else _under(x, s) for x, s in pairs]
        return jax.tree.unflatten(tree, placed)

    def for_jit(self) -> tuple[Any, Any]:
        """`in_shardings` and `out_shardings`; None where none is named."""
        ins = outs = None
        if any(self.ins):
            ins = jax.tree.unflatten(self.tree, self.ins)[0]
        if any(self.outs):
            outs = jax.tree.unflatten(self.out_tree, self.outs)
        return ins, outs


def _under(array, sharding) -> jax.ShapeDtypeStruct:
    weak = getattr(array, "weak_type", False)
    how = {"sharding": sharding, "weak_type": weak}
    return jax.ShapeDtypeStruct(array.shape, array.dtype, **how)


NO_SHARDINGS = JitShardings()


def shardings_of(traced: jaxprs.Traced, tree: Any) -> JitShardings:
    """The shardings of a step, whose arguments have this tree, all of them arrays."""
    ins, outs = _named(traced.jaxpr)
    return JitShardings(ins, outs, tree, traced.out_tree)


def argument_shardings(arguments: Any, named: Leaves = ()) -> Leaves:
    """Of each array among the arguments; none at all where all are on one device.

    Args:
      arguments: arrays, their types, or tracers, of which the types alone are known.
      named: those that a jitted step names for them, None where it names none.
    """
    arrays = [x for x in jax.tree.leaves(arguments) if jaxprs.is_value(x)]
    known = map(_many, arrays)
    pairs = zip(named or [None] * len(arrays), known, strict=True)
    found = tuple(first if first is not None else own for first, own in pairs)
    return found if any(s is not None for s in found) else ()


def mesh_of(shardings: Leaves) -> tuple[tuple[str, int], ...]:
    """(name, size) of the axes of the mesh that these are of; none on one device."""
    meshes = (s.mesh.shape for s in shardings if isinstance(s, jax.NamedSharding))
    return tuple(next(meshes, {}).items())


def unplaced(arguments: Any) -> Any:
    """The arguments as another `jit` knows them, whose tracers are on no mesh."""

    def bare(x):
        sharding = _many(x)
        if sharding is None or is_explicit(sharding):
            return x
        weak = getattr(x, "weak_type", False)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak)

    return jax.tree.map(bare, arguments)


def _many(array) -> Any:
    """The sharding of an array that is on several devices."""
    if jaxprs.is_abstract(array):
        own = typed_sharding(array)
        return own if own is not None and own.mesh.size > 1 else None
    sharding = getattr(array, "sharding", None)
    return sharding if sharding is not None and sharding.num_devices > 1 else None


def _named(closed) -> tuple[Leaves, Leaves]:
    calls = _calls(closed)
    ins = _of(closed.jaxpr.invars, calls, "invars", "in_shardings")
    return ins, _of(closed.jaxpr.outvars, calls, "outvars", "out_shardings")


def _ends(closed) -> set[Any]:
    return {v for v in (*closed.jaxpr.invars, *closed.jaxpr.outvars) if is_var(v)}


def _calls(closed) -> list[Any]:
    """The calls of jitted functions that can be written out."""
    ends = _ends(closed)
    return [
        e for e in closed.jaxpr.eqns if primitives.is_jit(e) and not why_closed(e, ends)
    ]


def _of(variables: Sequence[Any], calls, atoms: str, shardings: str) -> Leaves:
    found: dict[Any, Any] = {}
    for eqn in calls:
        pairs = zip(getattr(eqn, atoms), eqn.params[shardings], strict=True)
        named = {v: s for v, s in pairs if is_var(v) and not _compat.is_unspecified(s)}
        found = named | found
    return tuple(found.get(v) if is_var(v) else None for v in variables)


def _opened(closed):
    """The jaxpr with its calls written out; only what is no end is constrained."""
    calls, ends = _calls(closed), _ends(closed)

    def rule(eqn, args: list) -> list[Any] | None:
        if any(eqn is call for call in calls):
            return opened(eqn, args, apart=ends)
        return None

    return jaxprs.rewritten(closed, rule)


def with_results_placed(closed, outs: Leaves):
    """The jaxpr with its results constrained."""
    # Not those that a `shard_map` has made, which says where they are, nor those that
    # go into another memory.
    if not any(outs):
        return closed
    jaxpr = jaxprs.split(closed)[0]
    maps = (e for e in jaxpr.eqns if primitives.is_shard_map(e))
    made = {v for eqn in maps for v in eqn.outvars}
    free = [not is_var(v) or v not in made for v in jaxpr.outvars]
    plain = [
        s if s is not None and ok and is_usual_memory(s) else None
        for s, ok in zip(outs, free, strict=True)
    ]
    run = lambda args: constrained(jaxprs.evaluate(closed, args), plain)
    return jaxprs.retrace(closed, run)
