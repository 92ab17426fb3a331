"""What a plan says in sentences: what was left as it was, and why."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.flatten import why_closed
from jaxmem.ir.graph import JaxprGraph, is_transposed, late_of
from jaxmem.ir.primitives import Kind
from jaxmem.ir.scans import is_var
from jaxmem.ir.shard_labels import labelled_shardings
from jaxmem.ir.shards import WHOLE, Shardings
from jaxmem.memory import format_bytes
from jaxmem.scheduling._rewritten import Rewritten
from jaxmem.scheduling.order.updates import Update, updates_of
from jaxmem.scheduling.plan.fingerprint import fingerprint
from jaxmem.scheduling.recompute.space import scans_in

_NOT_OPENED = (Kind.JIT, Kind.BRANCH, Kind.SOLVE)


def notes_of(rewritten: Rewritten, unchanged: bool) -> Iterator[str]:
    """Sentences on a rewritten step; `unchanged`: whether it was to stay as given."""
    for level in rewritten.levels:
        shardings = labelled_shardings(level.jaxpr, level.shardings)
        yield from held_up(level.jaxpr, level.aliases, shardings)
    closed = list(dict.fromkeys(_closed(rewritten)))
    yield from closed
    # levels that are alike have the same to say
    yield from dict.fromkeys(rewritten.notes)
    if unchanged:
        yield "nothing is changed: the original step takes the fewest bytes"
    # by their texts: a jaxpr that is traced anew is another object
    elif fingerprint(rewritten.written_out) == fingerprint(rewritten.jaxpr):
        said = closed or rewritten.notes
        why = "" if said else f": {_why_nothing(rewritten)}"
        yield f"nothing is changed{why}"


def _closed(rewritten: Rewritten) -> Iterator[str]:
    """Of equations that layers are in why nothing is done in them."""
    both = any(map(is_transposed, jaxprs.walk(rewritten.written_out)))
    for level in rewritten.levels:
        for eqn in level.jaxpr.jaxpr.eqns if both else ():
            if primitives.is_scan(eqn) and _compat.has_side_effects(eqn):
                inner = next(e for e in jaxprs.walk(jaxprs.bodies(eqn)[0]) if _acts(e))
                yield f"a scan is not changed: {named(inner)} has side effects"
            elif _holds_both(eqn):
                why = f": {why_closed(eqn)}" if primitives.is_jit(eqn) else ""
                yield f"{named(eqn)}, with the layers in it, is not changed{why}"


def _holds_both(eqn) -> bool:
    """Whether a backward pass and the forward one are in an equation not opened."""
    closed = primitives.of(eqn).kind in _NOT_OPENED or primitives.is_while(eqn)
    if is_transposed(eqn) or not closed:
        return False
    inside = (e for body in jaxprs.bodies(eqn) for e in jaxprs.walk(body))
    return any(map(is_transposed, inside))


def _acts(eqn) -> bool:
    return _compat.has_side_effects(eqn) and not jaxprs.bodies(eqn)


def _why_nothing(rewritten: Rewritten) -> str:
    eqns = list(jaxprs.walk(rewritten.written_out))
    backward = list(filter(is_transposed, eqns))
    if not backward:
        return (
            "it has no backward pass; schedule the function that takes the gradient "
            "and updates the parameters"
        )
    if not any(primitives.is_scan(e) for e in backward):
        return (
            "no layers are in a jax.lax.scan, and no unrolled layer has an "
            "in-place update of 1 MiB or more that other gradients follow"
        )
    if not scans_in(rewritten):
        return "no backward scan reads what a forward scan stacks for it alone"
    return "its scans keep nothing that can be recomputed from other residuals"


_INSTEAD = (
    ": clip each layer by its own norm (jaxmem.optim.clip_by_layer_norm), or put the "
    'layers into jax.lax.scan, where clip="two_pass" finds the number in a first '
    "backward pass"
)


def held_up(
    closed, aliases: Mapping[int, int], shardings: Shardings = WHOLE
) -> Iterator[str]:
    """A sentence for each operation that updates outside of loops wait for."""
    graph = JaxprGraph(closed)
    updates = updates_of(graph, aliases)
    owns = sorted(u.own for u in updates)
    of_number = defaultdict(list)
    for update in updates:
        of_number[update.number].append(update)
    loops = (e for e in graph.eqns if primitives.is_loop(e))
    instead = "" if any(map(is_transposed, loops)) else _INSTEAD
    for i, those in sorted(of_number.items()):
        if any(_waits(u, owns) for u in those):
            waiting = _outside_loops(graph, (v for u in those for v in u.leaves))
            if waiting:
                what = f"wait for {named(graph.eqns[i])}"
                text = _described(waiting, what, shardings)
                yield f"{text}, which needs the last of them{instead}"
    for i, sources in _taken_at_once(graph):
        waiting = _outside_loops(graph, sources)
        if waiting:
            what = f"go into {named(graph.eqns[i])} at once"
            yield _described(waiting, what, shardings)


def _waits(update: Update, owns: Sequence[int]) -> bool:
    """Whether the number it needs is made of gradients that come after its own.

    `owns`: when those of all updates are there, in order.
    """
    return bisect_right(owns, update.own) < bisect_right(owns, update.number)


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
        mixes = not primitives.of(eqn).elementwise and len(together) > 1
        if mixes and max(map(len, given)) < len(together):
            yield i, together
            continue  # what it makes is no gradient any more
        sources |= {v: together for v in eqn.outvars if v.aval.ndim}


def _outside_loops(graph: JaxprGraph, gradients: Iterable[Any]) -> set[Any]:
    """Those that no loop has made: of the others each has a line of its own."""
    makers = ((v, graph.eqns[graph.maker[v]]) for v in gradients)
    return {v for v, eqn in makers if not primitives.is_loop(eqn)}


def _described(gradients: set[Any], what: str, shardings: Shardings) -> str:
    size, count = sum(map(shardings.bytes_of, gradients)), len(gradients)
    arrays = "array" if count == 1 else "arrays"
    return f"{format_bytes(size)} of gradients in {count} {arrays} {what}"


def named(eqn) -> str:
    """An equation and its line, in words."""
    line = _compat.source_line(eqn)
    return primitives.quoted(eqn) + (f" at {line}" if line else "")
