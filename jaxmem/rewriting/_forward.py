"""What formulas of a step's forward pass keep for its backward pass.

A step has been differentiated: the backward pass reads the inside of a formula, which
is then no formula to `find`. Without the backward pass, and without what is computed
for it alone, the forward pass is left, in which it is one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.ir.graph import JaxprGraph, late_of
from jaxmem.rewriting._find import Match
from jaxmem.rewriting._flat_graph import build
from jaxmem.rewriting._library import LIBRARY
from jaxmem.rewriting._plan import RewritePlan, plan_rewrites
from jaxmem.rewriting._rewrite import Site, site_of


@dataclass(frozen=True)
class KeptInside:
    """A value inside a formula that the backward pass reads.

    Attributes:
      variable: of the list of equations that has both passes; of a scan, with all
        iterations.
      site: the formula.
      more: bytes that the lean op keeps beside what it is given, if it takes the
        formula's place; of one of the formula's values alone.
    """

    variable: Any
    site: Site
    more: int


def kept_inside(closed) -> list[KeptInside]:
    """The values that `rewrite` would release, of the function that was differentiated.

    Args:
      closed: a closed jaxpr that has both passes in one list of equations.
    """
    graph = JaxprGraph(closed)
    late = late_of(graph)
    forward = _forward_of(closed, graph, late)
    found = _Found()
    found.add(plan_rewrites(build(forward), LIBRARY), "")
    if not found.inside:
        return []
    read = {v for i in late for v in filter(jaxprs.is_var, graph.eqns[i].invars)}
    kept, seen = [], set()
    for v in (v for eqn in graph.eqns for v in eqn.outvars if v in read):
        match = None if graph.maker[v] in late else found.reached(graph, v)
        if match is not None:
            more = 0 if match in seen else _iterations(graph, v) * _kept_by_op(match)
            seen.add(match)
            kept.append(KeptInside(v, found.sites[match], more))
    return kept


def _forward_of(closed, graph: JaxprGraph, late: set[int]):
    """The equations before the backward pass that the step's own results need."""
    jaxpr, consts = jaxprs.split(closed)
    eqns = [eqn for i, eqn in enumerate(graph.eqns) if i not in late]
    made = {v for eqn in eqns for v in eqn.outvars} | set(graph.invars)
    outs = [v for v in jaxpr.outvars if jaxprs.is_var(v) and v in made]
    outs = list(dict.fromkeys(outs))
    info = jaxpr.debug_info._replace(result_paths=None)
    part = jaxpr.replace(eqns=eqns, outvars=outs, debug_info=info)
    return _compat.without_dead_code(_compat.ClosedJaxpr(part, consts))


def with_losses(closed):
    """A step that also returns its losses, where gradients are all that it asks for."""
    graph = JaxprGraph(closed)
    jaxpr, consts = jaxprs.split(closed)
    unread = (v for eqn in graph.eqns for v in eqn.outvars if v not in graph.users)
    losses = [v for v in unread if v not in graph.outputs and _is_number(v.aval)]
    info = jaxpr.debug_info._replace(result_paths=None)
    outs = [*jaxpr.outvars, *losses]
    return _compat.ClosedJaxpr(jaxpr.replace(outvars=outs, debug_info=info), consts)


def _is_number(aval) -> bool:
    return aval.shape == () and jnp.issubdtype(aval.dtype, jnp.floating)


def _iterations(graph: JaxprGraph, v) -> int:
    """Of the scan that stacks a value."""
    return graph.eqns[graph.maker[v]].params.get("length", 1)


@dataclass
class _Found:
    """Where formulas are, in the variables of the jaxpr and of the bodies in it."""

    inside: dict[Any, Match] = field(default_factory=dict)
    primal: set[Any] = field(default_factory=set)  # of the forward pass, no formula's
    sites: dict[Match, Site] = field(default_factory=dict)

    def add(self, plan: RewritePlan, path: str) -> None:
        """The formulas of a graph, and of those inside it."""
        covered = {n: m for m in plan.matches.values() for n in m.covered}
        for node in plan.graph.nodes:
            match = covered.get(node) if node in plan.skipped else None
            for v in node.eqn.outvars:
                if match is None:
                    self.primal.add(v)
                else:
                    self.inside[v] = match
            if node in plan.matches:
                found = plan.matches[node]
                self.sites[found] = site_of(found.pattern, node, path)
            for inner in plan.inner.get(node, ()):
                self.add(inner, path)

    def reached(self, graph: JaxprGraph, v) -> Match | None:
        """The formula in which a value is, or out of whose inside it is made."""
        todo, seen = [v], set()
        while todo:
            v = todo.pop()
            if v in seen or v not in graph.maker:
                continue
            seen.add(v)
            if v in self.inside:
                return self.inside[v]
            eqn = graph.eqns[graph.maker[v]]
            for inner, out in self._bodies(eqn, v):
                if (match := self.reached(JaxprGraph(inner), out)) is not None:
                    return match
            if v not in self.primal:
                todo += filter(jaxprs.is_var, eqn.invars)
        return None

    def _bodies(self, eqn, v) -> Iterator[tuple[Any, Any]]:
        """The bodies of a call or a scan, with what is `v` inside."""
        for body in jaxprs.bodies(eqn):
            outs = jaxprs.split(body)[0].outvars
            if len(outs) == len(eqn.outvars):
                out = outs[eqn.outvars.index(v)]
                if jaxprs.is_var(out):
                    yield body, out


def _kept_by_op(match: Match) -> int:
    """Bytes that the lean op keeps beside its arguments and its result."""
    arguments = [jax.ShapeDtypeStruct(a.full, a.dtype) for a in match.arguments]
    out = match.root.outs[0].aval
    call = lambda *xs: match.pattern.lean(*xs, **match.scalars)
    total = 0
    for aval, source in _compat.saved_residuals(call, *arguments):
        own = source.startswith(("from the argument", "from a constant"))
        if not own and aval.shape != out.shape:
            total += math.prod(aval.shape) * aval.dtype.itemsize
    return total
