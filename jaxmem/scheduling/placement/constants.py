"""Large constants of scans, made inside of them where that costs next to nothing.

What is the same in every iteration of a scan is moved out of it when JAX separates the
forward from the backward pass. A causal mask, made of two iotas inside a layer, then
exists as [batch, heads, t, s] from the first layer's forward pass to its backward pass.
If each iteration makes it, it is part of the kernel that reads it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from jaxmem.ir import jaxprs
from jaxmem.ir.costs import fused_only
from jaxmem.ir.graph import JaxprGraph, Values, done_otherwise
from jaxmem.ir.scans import LARGE, is_var, scan_like, size_of, split
from jaxmem.scheduling._pass import Level, Pass

_SMALLER = 4  # how many times less memory the arrays take that a constant is made of


Leaves = Mapping[Any, set[Any]]  # constant of a scan -> arrays that it is made of


@dataclass(frozen=True)
class Constants:
    """Nothing can be chosen: what it does never costs."""

    name: ClassVar[str] = "constants"


class ConstantsInside(Pass[Constants, Leaves]):
    """Such constants are made in each iteration of the scans that read them."""

    config = Constants

    def analyse(self, level: Level, config: Constants) -> Iterator[Leaves]:
        if leaves := dict(_made_of_little(JaxprGraph(level.jaxpr))):
            yield leaves

    def apply(self, level: Level, rewrite: Leaves):
        graph = JaxprGraph(level.jaxpr)
        readers = {
            i: partial(_scan, eqn, rewrite)
            for i, eqn in enumerate(graph.eqns)
            if eqn.primitive.name == "scan" and rewrite.keys() & set(_constants(eqn))
        }
        return done_otherwise(level.jaxpr, graph, readers)


def _constants(eqn) -> list[Any]:
    return [v for v in split(eqn, eqn.invars)[0] if is_var(v)]


def _made_of_little(graph: JaxprGraph) -> Iterator[tuple[Any, set[Any]]]:
    """(constant of a scan, the arrays that it can be made of for nothing)."""
    scans = (e for e in graph.eqns if e.primitive.name == "scan")
    for v in dict.fromkeys(v for eqn in scans for v in _constants(eqn)):
        if v in graph.maker and size_of(v) >= LARGE:
            leaves = _leaves(graph, v)
            if _SMALLER * sum(map(size_of, leaves)) <= size_of(v):
                yield v, leaves


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


def _scan(eqn, leaves: Mapping[Any, set[Any]], values: Values) -> list[Any]:
    _, init, xs = split(eqn, [values.read(v) for v in eqn.invars])
    atoms = split(eqn, eqn.invars)[0]
    # what the body reads from outside: leaves, and the constants that stay
    ends = {u for v in filter(is_var, atoms) for u in leaves.get(v, {v})}
    outside = {v: values.read(v) for v in ends}

    def step(carry, x):
        inside = Values(values.graph, dict(outside))
        consts = [inside.read(v) for v in atoms]
        outs = jaxprs.evaluate(eqn.params["jaxpr"], [*consts, *carry, *x])
        return outs[: len(init)], outs[len(init) :]

    last, ys = scan_like(eqn, step, init, xs)
    return [*last, *ys]
