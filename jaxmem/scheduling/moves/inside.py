"""What lies outside of scans and is read inside, made there slice by slice.

A step that casts all parameters first (bf16 compute, f32 masters) holds a narrow copy
of every layer from the forward pass to the end of the backward pass. A causal mask is
the same in every layer, so JAX makes it outside of both scans, as [batch, heads, t, s].
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.ir import primitives
from jaxmem.ir.fused import fused_only
from jaxmem.ir.graph import JaxprGraph, Values, done_otherwise
from jaxmem.ir.placements import Placements, Shard
from jaxmem.ir.placements.layers import of_slice
from jaxmem.ir.placements.lower import on_part, one
from jaxmem.ir.scans import LARGE, is_var, run_body, scan_like, split, xs_of
from jaxmem.scheduling._pass import Level, Pass

_FIRST = Placements((Shard(0),), (Shard(0),))
Recipe = tuple[Any, ...]  # the equations from an input of the jaxpr to an array


@dataclass(frozen=True)
class Casts:
    """Nothing can be chosen: what it does never costs."""

    name: ClassVar[str] = "casts"


class CastInside(Pass[Casts, dict[Any, Recipe]]):
    """Casts and moves of inputs are done where their slices are read."""

    config = Casts

    def analyse(self, level: Level, config: Casts) -> Iterator[dict[Any, Recipe]]:
        if recipes := _recipes(JaxprGraph(level.jaxpr)):
            yield recipes

    def apply(self, level: Level, rewrite: dict[Any, Recipe]):
        graph = JaxprGraph(level.jaxpr)
        readers = {
            i: partial(_scan_of_slices, eqn, rewrite)
            for i, eqn in enumerate(graph.eqns)
            if primitives.is_scan(eqn) and any(v in rewrite for v in xs_of(eqn))
        }
        return done_otherwise(level.jaxpr, graph, readers)


def _recipes(graph: JaxprGraph) -> dict[Any, Recipe]:
    scans = (e for e in graph.eqns if primitives.is_scan(e))
    stacks = (v for eqn in scans for v in xs_of(eqn) if is_var(v) and v in graph.maker)
    found = {v: _recipe(graph, v) for v in stacks if _only_for_scans(graph, v)}
    return {v: recipe for v, recipe in found.items() if recipe}


def _only_for_scans(graph: JaxprGraph, v) -> bool:
    """Whether scans read slices of it, and nobody the whole."""
    return (
        v not in graph.outputs
        and all(
            primitives.is_scan(graph.eqns[u])
            and v in xs_of(graph.eqns[u])
            # as a constant or in the carry the body reads all of it
            and v not in graph.eqns[u].invars[: sum(_compat.scan_counts(graph.eqns[u]))]
            for u in graph.users[v]
        )
    )


def _recipe(graph: JaxprGraph, v) -> Recipe:
    """From an input of the jaxpr; empty where a step is not cheap or leaves axis 0."""
    eqns: list[Any] = []
    while v in graph.maker:
        eqn = graph.eqns[graph.maker[v]]
        if not primitives.of(eqn).moves or of_slice(eqn, 0) != _FIRST:
            return ()
        eqns.insert(0, eqn)
        v = eqn.invars[0]
    return tuple(eqns)


def _scan_of_slices(eqn, recipes: Mapping[Any, Recipe], values: Values) -> list[Any]:
    consts, init, _ = split(eqn, [values.read(v) for v in eqn.invars])
    stacks = xs_of(eqn)
    found = [recipes.get(v, ()) if is_var(v) else () for v in stacks]
    sources = [r[0].invars[0] if r else v for v, r in zip(stacks, found, strict=True)]

    def step(carry, xs):
        slices = [_follow(r, x) for r, x in zip(found, xs, strict=True)]
        return run_body(eqn, consts, carry, slices)

    ends, ys = scan_like(eqn, step, init, [values.read(v) for v in sources])
    return [*ends, *ys]


def _follow(recipe: Recipe, x):
    """What the recipe makes of one slice."""
    if not recipe:
        return x
    # the equations' parameters hold for an axis of size one, not for none
    x = jnp.expand_dims(x, 0)
    for eqn in recipe:
        (x,) = on_part(eqn, [x], _FIRST, one)
    return jnp.squeeze(x, 0)


# How many times less memory the arrays take that a constant is made of: of what takes
# about as much, the loop would read as many bytes and compute besides.
_SMALLER = 4


Leaves = Mapping[Any, set[Any]]  # constant of a scan -> arrays that it is made of


@dataclass(frozen=True)
class Constants:
    """Nothing can be chosen: what it does never costs."""

    name: ClassVar[str] = "constants"


class ConstantsInside(Pass[Constants, Leaves]):
    """Such constants are made in each iteration of the scans that read them."""

    config = Constants

    def analyse(self, level: Level, config: Constants) -> Iterator[Leaves]:
        if leaves := dict(_made_of_little(level)):
            yield leaves

    def apply(self, level: Level, rewrite: Leaves):
        graph = JaxprGraph(level.jaxpr)
        readers = {
            i: partial(_scan_with_constants, eqn, rewrite)
            for i, eqn in enumerate(graph.eqns)
            if primitives.is_scan(eqn) and rewrite.keys() & set(_constants(eqn))
        }
        return done_otherwise(level.jaxpr, graph, readers)


def _constants(eqn) -> list[Any]:
    return [v for v in split(eqn, eqn.invars)[0] if is_var(v)]


def _made_of_little(level: Level) -> Iterator[tuple[Any, set[Any]]]:
    """(constant of a scan, the arrays that it can be made of for nothing)."""
    graph = JaxprGraph(level.jaxpr)
    scans = {i: e for i, e in enumerate(graph.eqns) if primitives.is_scan(e)}
    for v in dict.fromkeys(v for eqn in scans.values() for v in _constants(eqn)):
        if v in graph.maker and level.size(v) >= LARGE:
            leaves = _leaves(graph, v)
            readers = {i: e for i, e in scans.items() if v in _constants(e)}
            # what the scans hold besides takes nothing more in the constant's place
            more = leaves - _read_anyway(graph, v, readers)
            if _SMALLER * sum(map(level.size, more)) <= level.size(v):
                yield v, leaves


def _read_anyway(graph: JaxprGraph, v, readers: Mapping[int, Any]) -> set[Any]:
    """What scans hold besides a constant, where it is gone once they make it."""
    # What is no part of a fusion would be made, and take its place, in each iteration.
    alone = {*graph.users[v]} <= {*readers} and v not in graph.outputs
    if not alone or not all(_is_fused_in(eqn, v) for eqn in readers.values()):
        return set()
    return set.intersection(*({*_constants(eqn)} for eqn in readers.values()))


def _is_fused_in(eqn, v) -> bool:
    """Whether all that a scan's body does with a constant is in fusions."""
    body = JaxprGraph(eqn.params["jaxpr"])
    pairs = zip(split(eqn, eqn.invars)[0], body.arguments, strict=False)
    own = [w for u, w in pairs if u is v]
    users = (body.eqns[i] for w in own for i in body.users.get(w, ()))
    kept = body.outputs.isdisjoint(own)
    return kept and all(fused_only(one) is not None for one in users)


def _leaves(graph: JaxprGraph, v) -> set[Any]:
    """The arrays from which equations that cost nothing make it."""
    found, seen, todo = set(), set(), [v]
    while todo:
        v = todo.pop()
        i = graph.maker.get(v)
        if i is None or fused_only(graph.eqns[i]) is None:
            found.add(v)
        elif i not in seen:
            seen.add(i)
            todo += filter(is_var, graph.eqns[i].invars)
    return found


def _scan_with_constants(
    eqn, leaves: Mapping[Any, set[Any]], values: Values
) -> list[Any]:
    _, init, xs = split(eqn, [values.read(v) for v in eqn.invars])
    atoms = split(eqn, eqn.invars)[0]
    # what the body reads from outside: leaves, and the constants that stay
    ends = {u for v in filter(is_var, atoms) for u in leaves.get(v, {v})}
    outside = {v: values.read(v) for v in ends}

    def step(carry, x):
        inside = Values(values.graph, dict(outside))
        consts = [inside.read(v) for v in atoms]
        return run_body(eqn, consts, carry, x)

    last, ys = scan_like(eqn, step, init, xs)
    return [*last, *ys]
