"""Walking, evaluating and rebuilding jaxprs.

What rewriting and scheduling share: trace a function of any pytrees, see the bodies
inside an equation (`scan`, `cond`, `remat`, ...) whatever the parameter is called, and
run an equation again with other bodies and everything else as it was.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
from jax.sharding import AxisType

from jaxmem import _compat
from jaxmem.ir import primitives
from jaxmem.ir.types import Atom, Body, ClosedJaxpr, JaxprEqn


@dataclass(frozen=True)
class Traced:
    """A traced function: its jaxpr, the array leaves it takes, its output tree."""

    jaxpr: Any
    leaves: list[Any]
    out_tree: Any


def is_value(leaf: Any) -> bool:
    """Whether a leaf of a pytree is an array or a number."""
    return is_array(leaf) or isinstance(leaf, bool | int | float | complex)


def is_array(leaf: Any) -> bool:
    """Whether a leaf is traced; Python scalars, strings, functions stay as they are."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def exchanged(leaves: Sequence[Any], places: Sequence[int], new: Iterable[Any]) -> list:
    """The leaves, with others at some places."""
    changed = dict(zip(places, new, strict=True))
    return [changed.get(i, leaf) for i, leaf in enumerate(leaves)]


def trace(fn: Callable, *args: Any, **kwargs: Any) -> Traced:
    """The jaxpr of `fn` at these arguments, its non-array leaves held fixed."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    dynamic = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

    def flat(*arrays: Any) -> Any:
        args, kwargs = jax.tree.unflatten(tree, exchanged(leaves, dynamic, arrays))
        return fn(*args, **kwargs)

    arrays = [leaves[i] for i in dynamic]
    jaxpr, out = jax.make_jaxpr(flat, return_shape=True)(*arrays)
    return Traced(jaxpr, arrays, jax.tree.structure(out))


def is_var(atom: Atom) -> bool:
    """Whether an operand is a variable, not a literal."""
    return not isinstance(atom, _compat.Literal)


SYMBOLIC = 128  # what a dimension of `jax.export` without a number counts as


def elements(shape: Sequence[Any]) -> int:
    """How many elements an array has, to compare it with others."""
    return math.prod(d if isinstance(d, int) else SYMBOLIC for d in shape)


def split(body: Body) -> tuple[Any, Sequence[Any]]:
    """(jaxpr, constants) of a closed or an open jaxpr."""
    return getattr(body, "jaxpr", body), getattr(body, "consts", ())


def is_body(value: Any) -> bool:
    return isinstance(value, (_compat.Jaxpr, _compat.ClosedJaxpr))


def bodies(eqn: JaxprEqn) -> list[Any]:
    """The jaxprs among the parameters of an equation, in a fixed order."""
    found = []
    # by name: `rebind` exchanges them in the same order
    for _, value in sorted(eqn.params.items()):
        values = value if isinstance(value, (tuple, list)) else (value,)
        found += [v for v in values if is_body(v)]
    return found


def called(eqn: JaxprEqn) -> Any:
    """The body of a call, whose inputs and outputs are those of the equation."""
    inside = bodies(eqn)
    # bodies of these take slices, or the part of one device
    if len(inside) != 1 or primitives.is_loop(eqn) or primitives.is_shard_map(eqn):
        return None
    jaxpr = split(inside[0])[0]
    counts = len(jaxpr.invars), len(jaxpr.outvars)
    return inside[0] if counts == (len(eqn.invars), len(eqn.outvars)) else None


def keeps_sharding(eqn: JaxprEqn) -> bool:
    """Whether an equation reshards an array to the sharding that it has."""
    # The functions of jax.random do so to what they take and give under a mesh without
    # explicit axes, if they are asked for a sharding.
    if eqn.primitive.name != "reshard":
        return False
    before, after = (v.aval.sharding for v in (*eqn.invars, *eqn.outvars))
    return before == after or not (is_explicit(before) or is_explicit(after))


def is_explicit(sharding: Any) -> bool:
    """Whether it is on a mesh whose axes are part of arrays' types."""
    kinds = getattr(getattr(sharding, "mesh", None), "axis_types", ())
    return AxisType.Explicit in kinds


def walk(body: Body) -> Iterator[Any]:
    """Every equation, those of nested bodies after the one that holds them."""
    for eqn in split(body)[0].eqns:
        yield eqn
        for inner in bodies(eqn):
            yield from walk(inner)


def retrace(body: Body, fn: Callable[[list], list]) -> ClosedJaxpr:
    """A closed jaxpr of `fn`, at the argument types of `body`."""
    avals = [v.aval for v in split(body)[0].invars]
    # what the user's own function does with tracers has been seen when it was traced
    with _compat.no_leak_check():
        return jax.make_jaxpr(lambda *args: fn(list(args)))(*avals)


def rebind(eqn: JaxprEqn, args: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    """Outputs of `eqn` with its `bodies` exchanged for the closed jaxprs `new`."""
    fresh = iter(new)
    extra: list[Any] = []

    def exchange(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(exchange, value)) if has_body(value) else value
        if not is_body(value):
            return value
        body = next(fresh)
        if not primitives.is_remat(eqn):
            return body
        # an open jaxpr has no constants: they become its first arguments
        extra.extend(body.consts)
        return _compat.constants_first(body) if body.consts else body.jaxpr

    # in the order of `bodies`
    params = {k: exchange(v) for k, v in sorted(eqn.params.items())}
    return _compat.bind(eqn, [*extra, *args], params)


def has_body(values: Iterable[Any]) -> bool:
    return any(map(is_body, values))


def evaluate(
    body: Body, args: Sequence[Any], rule: Callable | None = None
) -> list[Any]:
    """Runs a closed jaxpr; `rule(eqn, args)` may answer for an equation, or None."""
    jaxpr, consts = split(body)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Atom) -> Any:
        return atom.val if isinstance(atom, _compat.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        outs = rule(eqn, values) if rule else None
        outs = _compat.bind(eqn, values) if outs is None else outs
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def rewritten(closed: ClosedJaxpr, rule: Callable) -> ClosedJaxpr:
    """The jaxpr in which `rule(eqn, args)` answers for equations, as in `evaluate`."""
    return retrace(closed, lambda args: evaluate(closed, args, rule))


def is_abstract(value: Any) -> bool:
    """Whether a value is not known now (it belongs to a trace around this one)."""
    return isinstance(value, jax.core.Tracer)
