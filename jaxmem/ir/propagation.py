"""How the arrays of a list of equations are sharded, as XLA's own propagation has it.

The equations are lowered with all that they make as results, and Shardy's propagation,
which XLA runs first, is run on the module: a tenth of a second, and nothing is
compiled. What XLA does afterwards it does to shards: it gathers operands of products,
and sums what products of shards give.

Arrays that are made of numbers alone have a copy for each reader, sharded as the reader
is: they are told by the labels of `ir.placements`. What is sharded over a part of an
axis of the mesh alone (4 heads over 8 devices) is taken to be whole.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.auto_axes import on_auto_axes
from jaxmem.ir.jaxprs import elements, is_var
from jaxmem.ir.placements.rules import same_axis
from jaxmem.ir.primitives import Kind
from jaxmem.ir.scans import is_on_host, split
from jaxmem.ir.shards import InputShardings, Names, Shardings, Spec, sharding_of
from jaxmem.ir.types import Body, Jaxpr, JaxprEqn, Var

# jaxpr -> how its inputs are sharded -> what was found
_FOUND: weakref.WeakKeyDictionary[Any, dict[Any, Shardings]] = (
    weakref.WeakKeyDictionary()
)


_SMALL = 2**16  # elements below which it is no matter how numbers are sharded


def shardings_in(closed: Body, given: InputShardings | None) -> Shardings:
    """How the arrays of a list of equations are sharded, by how its inputs are."""
    jaxpr = jaxprs.split(closed)[0]
    if given is None or not _is_known(jaxpr):
        return Shardings()
    known = _FOUND.setdefault(jaxpr, {})
    if given not in known:
        with on_auto_axes():
            known[given] = _propagated(closed, given)
    return known[given]


def given_inside(
    eqn: JaxprEqn, body: Body, shardings: Shardings
) -> InputShardings | None:
    """How the inputs of a body are sharded, as far as that is known."""
    if primitives.is_scan(eqn) or primitives.is_branch(eqn):
        return shardings.body(eqn)
    return shardings.inputs(eqn.invars) if jaxprs.called(eqn) is body else None


def _is_known(jaxpr: Jaxpr) -> bool:
    """Whether the equations can be lowered as they are: all sizes are numbers."""
    sizes = (d for v in jaxpr.invars for d in v.aval.shape)
    return _compat.uses_shardy() and all(isinstance(d, int) for d in sizes)


def _propagated(closed: Body, given: InputShardings) -> Shardings:
    jaxpr = jaxprs.split(closed)[0]
    made = [v for v in _outputs(jaxpr) if hasattr(v.aval, "shape")]

    def run(*args: Any) -> Any:
        env: dict[Any, Any] = {}

        def rule(eqn: JaxprEqn, args: list) -> list[Any]:
            outs = _told(eqn, args)
            outs = _compat.bind(eqn, args) if outs is None else outs
            env.update(zip(eqn.outvars, outs, strict=True))
            return outs

        jaxprs.evaluate(closed, args, rule)
        return [env[v] for v in made]

    pairs = zip(jaxpr.invars, given.of, strict=True)
    args = [_placed(v.aval, given.mesh, spec) for v, spec in pairs]
    found = Shardings(given.mesh, dict(zip(jaxpr.invars, given.of, strict=True)))
    for v, axes in zip(made, _compat.propagated(run, args), strict=True):
        axes = axes[: v.aval.ndim]  # a key has axes that its type does not show
        if any(axes):
            found.of[v] = axes
    _tell_numbers(closed, found)
    return found


def _outputs(jaxpr: Jaxpr) -> Iterator[Any]:
    return (v for eqn in jaxpr.eqns for v in eqn.outvars)


def _placed(aval: Any, mesh: Any, spec: Spec) -> jax.ShapeDtypeStruct:
    how = {"weak_type": getattr(aval, "weak_type", False)}
    where = sharding_of(mesh, spec)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=where, **how)


# What is lowered for one chip alone, and what is sharded by other rules. CHLO is
# rewritten by XLA before Shardy runs, by a pass that jaxlib does not offer.
_TOLD = (Kind.KERNEL, Kind.SHARD_MAP, Kind.TRANSFER)


def _is_told(eqn: JaxprEqn) -> bool:
    known = primitives.of(eqn)
    return (
        known.kind in _TOLD
        or known.in_chlo
        or not jaxprs.bodies(eqn)
        and _compat.has_side_effects(eqn)
    )


def _told(eqn: JaxprEqn, args: list) -> list[Any] | None:
    """Instead of what Shardy cannot follow, or needs a chip: what it says of shards."""
    if primitives.is_transfer(eqn):
        return args
    if primitives.of(eqn).in_chlo:
        return [jax.lax.neg(*args)]
    if primitives.is_shard_map(eqn):
        mesh, specs = eqn.params["mesh"], eqn.params["out_specs"]
        outs = zip(_zeros(eqn), specs, strict=True)
        place = jax.lax.with_sharding_constraint
        return [place(x, jax.NamedSharding(mesh, spec)) for x, spec in outs]
    if _is_told(eqn):
        return _zeros(eqn)
    bodies = jaxprs.bodies(eqn)
    if not any(map(_is_retold, bodies)):
        return None
    closed = [b if hasattr(b, "consts") else _compat.ClosedJaxpr(b, ()) for b in bodies]
    return jaxprs.rebind(eqn, args, [_retold(body) for body in closed])


def _is_retold(body: Body) -> bool:
    # what only reads the host's memory, as a slice does, has its types from there
    given = jaxprs.split(body)[0].invars
    return any(map(_is_told, jaxprs.walk(body))) or any(map(is_on_host, given))


def _retold(body: Body) -> Any:
    # in the device's memory all of it: what is sent to another one is not, here
    avals = [_plain(v.aval) for v in jaxprs.split(body)[0].invars]
    run = lambda *args: jaxprs.evaluate(body, args, _told)
    return jax.make_jaxpr(run)(*avals)


def _plain(aval: Any) -> jax.ShapeDtypeStruct:
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)


def _zeros(eqn: JaxprEqn) -> list[Any]:
    return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]


def _tell_numbers(closed: Body, found: Shardings) -> None:
    """What is made of numbers alone is sharded as what it is read for."""
    eqns, numbers = jaxprs.split(closed)[0].eqns, set()
    for eqn in eqns:
        if all(not is_var(v) or v in numbers for v in eqn.invars):
            numbers.update(eqn.outvars)
    for eqn in reversed(eqns):
        for v in filter(is_var, eqn.invars):
            told = v in found.of or v not in numbers
            if not told and any(spec := _as_read(eqn, v, found)):
                found.of[v] = spec


def _as_read(eqn: JaxprEqn, v: Var, found: Shardings) -> Spec:
    """How an operand is sharded, by what is known of an equation's other arrays."""
    if primitives.is_scan(eqn):
        return _as_read_in_scan(eqn, v, found)
    if (body := jaxprs.called(eqn)) is not None:
        return _as_read_in_call(eqn, v, found, body)
    spec: list[Names] = [()] * v.aval.ndim
    for other in filter(is_var, (*eqn.outvars, *eqn.invars)):
        for axis, names in enumerate(found.of.get(other, ())):
            place = _same_axis(eqn, v, other, axis, found.size(names))
            if place is not None and not any({*names} & {*s} for s in spec):
                spec[place] = spec[place] or names
    return tuple(spec)


def _as_read_in_scan(eqn: JaxprEqn, v: Var, found: Shardings) -> Spec:
    """The same of what a scan carries, or reads in each iteration."""
    consts, carry, _ = split(eqn, eqn.invars)
    k = next(k for k, atom in enumerate(eqn.invars) if atom is v)
    if k >= len(consts):
        is_carried = k < len(consts) + len(carry)
        return found.of.get(eqn.outvars[k - len(consts)], ()) if is_carried else ()
    if elements(v.aval.shape) < _SMALL:
        return ()
    body = eqn.params["jaxpr"]
    inside = shardings_in(body, found.body(eqn))
    return _first_read(jaxprs.split(body)[0], k, inside)


def _as_read_in_call(eqn: JaxprEqn, v: Var, found: Shardings, body: Body) -> Spec:
    jaxpr = jaxprs.split(body)[0]
    pairs = zip(
        (*eqn.invars, *eqn.outvars), (*jaxpr.invars, *jaxpr.outvars), strict=True
    )
    known = {w: found.of[u] for u, w in pairs if is_var(u) and u in found.of}
    k = next(k for k, atom in enumerate(eqn.invars) if atom is v)
    return _first_read(jaxpr, k, Shardings(found.mesh, known))


def _first_read(jaxpr: Jaxpr, k: int, inside: Shardings) -> Spec:
    """As the first equation of a body that tells reads its input number `k`."""
    v = jaxpr.invars[k]
    reads = (e for e in jaxpr.eqns if any(v is w for w in e.invars))
    return next(filter(any, (_as_read(e, v, inside) for e in reads)), ())


def _same_axis(eqn: JaxprEqn, v: Var, other: Var, axis: int, n: int) -> int | None:
    """Which axis of `v` is that axis of another array, in an equation."""
    atoms = [*eqn.invars, *eqn.outvars]
    first = lambda atom: next(k for k, a in enumerate(atoms) if a is atom)
    same = same_axis(eqn, first(other), axis, n) if n > 1 else None
    place = same[first(v)] if same else None
    return None if place is None or v.aval.shape[place] % n else place
