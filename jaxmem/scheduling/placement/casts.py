"""Casts of whole stacks of parameters, done slice by slice inside the scans.

A step that casts all parameters first (bf16 compute, f32 masters) holds a narrow copy
of every layer from the forward pass to the end of the backward pass. Where nothing but
scans reads the copy, each iteration casts its own slice instead.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.ir.graph import JaxprGraph, Values, done_otherwise
from jaxmem.ir.layer_axis import CHEAP, narrow, operand_axes
from jaxmem.ir.scans import is_var, scan_like, split, xs_of
from jaxmem.scheduling._pass import Level, Pass

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
            i: partial(_scan, eqn, rewrite)
            for i, eqn in enumerate(graph.eqns)
            if eqn.primitive.name == "scan" and any(v in rewrite for v in xs_of(eqn))
        }
        return done_otherwise(level.jaxpr, graph, readers)


def _recipes(graph: JaxprGraph) -> dict[Any, Recipe]:
    found = {}
    for eqn in graph.eqns:
        if eqn.primitive.name != "scan":
            continue
        for v in xs_of(eqn):
            if is_var(v) and v in graph.maker and _only_for_scans(graph, v):
                recipe = _recipe(graph, v)
                if recipe:
                    found[v] = recipe
    return found


def _only_for_scans(graph: JaxprGraph, v) -> bool:
    """Whether scans read slices of it, and nobody the whole."""
    return v not in graph.outputs and all(
        graph.eqns[u].primitive.name == "scan"
        and v in xs_of(graph.eqns[u])
        and v not in graph.eqns[u].invars[: sum(_compat.scan_counts(graph.eqns[u]))]
        for u in graph.users[v]
    )


def _recipe(graph: JaxprGraph, v) -> Recipe:
    """From an input of the jaxpr; empty where a step is not cheap or leaves axis 0."""
    eqns: list[Any] = []
    while v in graph.maker:
        eqn = graph.eqns[graph.maker[v]]
        if eqn.primitive.name not in CHEAP or operand_axes(eqn, 0) != (0,):
            return ()
        eqns.insert(0, eqn)
        v = eqn.invars[0]
    return tuple(eqns)


def _scan(eqn, recipes: Mapping[Any, Recipe], values: Values) -> list[Any]:
    consts, init, _ = split(eqn, [values.read(v) for v in eqn.invars])
    stacks = xs_of(eqn)
    found = [recipes.get(v, ()) if is_var(v) else () for v in stacks]
    sources = [r[0].invars[0] if r else v for v, r in zip(stacks, found, strict=True)]

    def step(carry, xs):
        slices = [_follow(r, x) for r, x in zip(found, xs, strict=True)]
        outs = jaxprs.evaluate(eqn.params["jaxpr"], [*consts, *carry, *slices])
        return outs[: len(init)], outs[len(init) :]

    ends, ys = scan_like(eqn, step, init, [values.read(v) for v in sources])
    return [*ends, *ys]


def _follow(recipe: Recipe, x):
    """What the recipe makes of one slice."""
    if not recipe:
        return x
    x = jnp.expand_dims(x, 0)
    for eqn in recipe:
        (x,) = _compat.bind(eqn, [x], narrow(eqn, (0,)))
    return jnp.squeeze(x, 0)
