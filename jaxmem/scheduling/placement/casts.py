"""Casts of whole stacks of parameters, done slice by slice inside the scans.

A step that casts all parameters first (bf16 compute, f32 masters) holds a narrow copy
of every layer from the forward pass to the end of the backward pass. Where nothing but
scans reads the copy, each turn casts its own slice instead.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxmem import _compat, _jaxpr
from jaxmem.ir.graph import JaxprGraph, Values, done_otherwise
from jaxmem.ir.layer_axis import CHEAP, narrow, operand_axes
from jaxmem.ir.scans import is_var, scan_like, split, xs_of

Recipe = tuple[Any, ...]  # the equations from an input of the jaxpr to an array


def cast_inside(closed):
    """The jaxpr with casts and moves of inputs done where their slices are read."""
    graph = JaxprGraph(closed)
    recipes = _recipes(graph)
    readers = {
        i: partial(_scan, eqn, recipes)
        for i, eqn in enumerate(graph.eqns)
        if eqn.primitive.name == "scan" and any(v in recipes for v in xs_of(eqn))
    }
    return done_otherwise(closed, graph, readers) if readers else closed


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
    """From an input of the jaxpr; empty where the way is not cheap or leaves axis 0."""
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
    ways = [recipes.get(v, ()) if is_var(v) else () for v in xs_of(eqn)]
    starts = [
        way[0].invars[0] if way else v for v, way in zip(xs_of(eqn), ways, strict=True)
    ]

    def step(carry, xs):
        made = [_made(way, x) for way, x in zip(ways, xs, strict=True)]
        outs = _jaxpr.evaluate(eqn.params["jaxpr"], [*consts, *carry, *made])
        return outs[: len(init)], outs[len(init) :]

    ends, ys = scan_like(eqn, step, init, [values.read(v) for v in starts])
    return [*ends, *ys]


def _made(way: Recipe, x):
    if not way:
        return x
    x = jnp.expand_dims(x, 0)
    for eqn in way:
        (x,) = _compat.bind(eqn, [x], narrow(eqn, (0,)))
    return jnp.squeeze(x, 0)
