"""What stands in the way of updates outside of loops, in words.

An update that takes its gradient as it comes frees it. Of those that cannot it is said
what they wait for: how many bytes, which operation, and its line.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxmem import _compat
from jaxmem.ir.backward import is_transposed, late_of
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.layer_axis import ELEMENTWISE
from jaxmem.ir.scans import LOOPS, is_var, size_of
from jaxmem.memory import format_bytes
from jaxmem.scheduling.order.updates import Update, updates_of

_INSTEAD = (
    ": clip each layer by its own norm (jaxmem.optim.clip_by_layer_norm), or put the "
    'layers into jax.lax.scan, where clip="two_pass" finds the number in a first '
    "backward pass"
)


def held_up(closed, aliases: Mapping[int, int]) -> Iterator[str]:
    """A sentence for each operation that updates outside of loops wait for."""
    graph = JaxprGraph(closed)
    updates = updates_of(graph, aliases)
    loops = (e for e in graph.eqns if e.primitive.name in LOOPS)
    instead = "" if any(map(is_transposed, loops)) else _INSTEAD
    for i in sorted({u.number for u in updates}):
        those = [u for u in updates if u.number == i]
        if any(_waits(u, updates) for u in those):
            waiting = _outside_loops(graph, (v for u in those for v in u.leaves))
            if waiting:
                text = _described(waiting, f"wait for {named(graph.eqns[i])}")
                yield f"{text}, which needs the last of them{instead}"
    for i, sources in _taken_at_once(graph):
        waiting = _outside_loops(graph, sources)
        if waiting:
            yield _described(waiting, f"go into {named(graph.eqns[i])} at once")


def _waits(update: Update, updates: Iterable[Update]) -> bool:
    """Whether the number it needs is made of gradients that come after its own."""
    return any(update.own < u.own <= update.number for u in updates)


def _taken_at_once(graph: JaxprGraph) -> Iterator[tuple[int, set[Any]]]:
    """(equation that is not elementwise, the gradients of which it takes several)."""
    sources: dict[Any, set[Any]] = {}
    for i in sorted(late_of(graph)):
        eqn = graph.eqns[i]
        if is_transposed(eqn):
            sources |= {v: {v} for v in eqn.outvars if v.aval.ndim}
            continue
        given = [sources.get(v, set()) for v in eqn.invars if is_var(v)]
        together = set().union(*given)
        mixes = eqn.primitive.name not in ELEMENTWISE and len(together) > 1
        if mixes and max(map(len, given)) < len(together):
            yield i, together
            continue  # what it makes is no gradient any more
        sources |= {v: together for v in eqn.outvars if v.aval.ndim}


def _outside_loops(graph: JaxprGraph, gradients: Iterable[Any]) -> set[Any]:
    """Those that no loop has made: of the others each has a line of its own."""
    makers = ((v, graph.eqns[graph.maker[v]].primitive.name) for v in gradients)
    return {v for v, name in makers if name not in LOOPS}


def _described(gradients: set[Any], what: str) -> str:
    size, count = sum(map(size_of, gradients)), len(gradients)
    arrays = "array" if count == 1 else "arrays"
    return f"{format_bytes(size)} of gradients in {count} {arrays} {what}"


def named(eqn) -> str:
    """An equation and its line, in words."""
    line = _compat.source_line(eqn)
    return f"`{eqn.primitive.name}`" + (f" at {line}" if line else "")
