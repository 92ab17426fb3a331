"""One list of equations: what hides the backward scan or the update is opened."""

from collections.abc import Callable, Sequence, Set
from typing import Any

import jax

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.jaxprs import is_explicit
from jaxmem.ir.primitives import Kind
from jaxmem.ir.scans import barrier, is_var
from jaxmem.ir.types import ClosedJaxpr, JaxprEqn


def flatten(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr with inner `jit`s, and remat round a whole loss, written out."""
    # A `jax.checkpoint` that is being differentiated is what its lowering makes of it:
    # the recomputation, behind a barrier.

    def rule(eqn: JaxprEqn, args: list) -> list[Any] | None:
        if is_plain_call(eqn) or _hides_backward_scan(eqn):
            return opened(eqn, args, rule)
        if primitives.is_scan(eqn) or primitives.is_branch(eqn):
            bodies = [flatten(body) for body in jaxprs.bodies(eqn)]
            return jaxprs.rebind(eqn, args, bodies)
        # `jax.jacfwd` splits what it gives into as many pieces as it has arguments
        if eqn.primitive.name == "split" and len(eqn.outvars) == 1:
            return args
        return None

    flat = jaxprs.rewritten(closed, rule)
    return _compat.without_dead_code(flat)


def opened(
    eqn: JaxprEqn,
    args: list,
    rule: Callable | None = None,
    apart: Set[Any] = frozenset(),
) -> list[Any]:
    """The outputs of a call whose equations are written out in its place."""
    # What the call says of shardings, its operands and results are constrained to.
    # `apart`: variables whose shardings are said elsewhere.

    def asked(variables: Sequence[Any], shardings: str) -> list[Any] | None:
        named = eqn.params.get(shardings)
        if named is None:
            return None
        pairs = zip(variables, named, strict=True)
        return [None if is_var(v) and v in apart else s for v, s in pairs]

    def run(eqn: JaxprEqn, args: list) -> list[Any]:
        args = constrained(args, asked(eqn.invars, "in_shardings"))
        # else XLA would merge the recomputation with the forward pass
        if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
            args = barrier(args)
        outs = jaxprs.evaluate(jaxprs.bodies(eqn)[0], args, rule)
        return constrained(outs, asked(eqn.outvars, "out_shardings"))

    return _compat.in_context_of(eqn, run, eqn, args)


def constrained(values: Sequence[Any], shardings: Sequence[Any] | None) -> list[Any]:
    """The values under these shardings; None, or one left to the compiler, is none."""
    if shardings is None:
        return list(values)
    return [
        jax.lax.with_sharding_constraint(x, s) if _is_asked(s) else x
        for x, s in zip(values, shardings, strict=True)
    ]


def _is_asked(sharding: Any) -> bool:
    """Whether a sharding is one, and not part of its array's type already."""
    return isinstance(sharding, jax.sharding.Sharding) and not is_explicit(sharding)


def typed_sharding(x: Any) -> Any:
    """What an array's type says of its sharding; None where that is nothing."""
    sharding = jax.typeof(x).sharding
    return sharding if is_explicit(sharding) else None


def full_spec(sharding: jax.NamedSharding, ndim: int) -> list[Any]:
    """The entries of a spec, which may have fewer, for each axis of an array."""
    return [*sharding.spec, *[None] * (ndim - len(sharding.spec))]


def is_plain_call(eqn: JaxprEqn) -> bool:
    """Whether an equation is a call that can be written out in its place."""
    if primitives.of(eqn).kind is Kind.CALL:
        return True
    return primitives.is_jit(eqn) and why_closed(eqn) == ""


def why_closed(eqn: JaxprEqn, apart: Set[Any] = frozenset()) -> str:
    """What a `jit` equation asks for that no constraint can say; or ""."""
    # `apart`: variables whose shardings are said elsewhere.
    layouts = (*eqn.params.get("in_layouts", ()), *eqn.params.get("out_layouts", ()))
    if any(layout is not None for layout in layouts):
        return "it names layouts"
    atoms = *eqn.invars, *eqn.outvars
    shardings = *eqn.params["in_shardings"], *eqn.params["out_shardings"]
    for atom, sharding in zip(atoms, shardings, strict=True):
        if _compat.is_unspecified(sharding) or (is_var(atom) and atom in apart):
            continue
        if not is_usual_memory(sharding):
            return f"it names the memory {sharding.memory_kind!r}"
        if is_explicit(sharding) and not _is_of_type(sharding, atom.aval):
            return "it names a sharding that is not of its array's type"
    return ""


def _is_of_type(sharding: Any, aval: Any) -> bool:
    """Whether an array's type says the same; no constraint may say otherwise."""
    return full_spec(sharding, aval.ndim) == [*aval.sharding.spec]


def is_usual_memory(sharding: Any) -> bool:
    """Whether it means the memory that arrays are in if nobody asks for another."""
    kind = sharding.memory_kind
    return kind is None or kind == next(iter(sharding.device_set)).default_memory().kind


def _hides_backward_scan(eqn: JaxprEqn) -> bool:
    if not primitives.is_remat(eqn):
        return False
    if not eqn.params["differentiated"]:
        return False
    return any(
        # the backward scan runs from the last layer to the first
        primitives.is_scan(e) and e.params["reverse"]
        for e in jaxprs.walk(jaxprs.bodies(eqn)[0])
    )
