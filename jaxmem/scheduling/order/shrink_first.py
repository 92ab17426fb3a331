"""In a backward scan's body, products that free an array before those that make one.

The gradient of attention's probabilities is as large as they are; that of the values
reads them for the last time. Both products are ready together. So each product that
makes much of little waits, behind a barrier, for those of its operands' other products
that make little of much: else both arrays may be there at once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from jaxmem import _compat
from jaxmem.ir import primitives
from jaxmem.ir.graph import (
    JaxprGraph,
    Values,
    done_otherwise,
    is_transposed,
    with_bodies,
)
from jaxmem.ir.propagation import shardings_in
from jaxmem.ir.scans import LARGE, barrier, is_var
from jaxmem.ir.shards import InputShardings, asked_by, of_spec
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._pass import Level
from jaxmem.scheduling._searched import Searched, SearchedStep

# A product makes much of little, or little of much, from this ratio on: below it both
# arrays are about as large, and the order of two products says nothing of the peak.
_TIMES = 2


Bodies = dict[int, list[Any]]  # position of a scan -> its new body


@dataclass(frozen=True)
class ShrinkFirst:
    """Whether products that make much of little wait for those that free much."""

    name: ClassVar[str] = "shrink_first"
    enabled: bool = False


class ProductsThatShrinkFirst(Searched[ShrinkFirst, Bodies]):
    """Such barriers are put into the bodies of backward scans."""

    config = ShrinkFirst
    orders = True
    anywhere = True

    def analyse(self, level: Level, config: ShrinkFirst) -> Iterator[Bodies]:
        if not config.enabled:
            return
        shardings = shardings_in(level.jaxpr, level.shardings)
        bodies = {
            i: [body]
            for i, eqn in enumerate(JaxprGraph(level.jaxpr).eqns)
            if primitives.is_scan(eqn) and is_transposed(eqn)
            if (body := _fenced(eqn.params["jaxpr"], shardings.body(eqn))) is not None
        }
        if bodies:
            yield bodies

    def apply(self, level: Level, rewrite: Bodies):
        return with_bodies(level.jaxpr, JaxprGraph(level.jaxpr), rewrite)

    def free(self, step: SearchedStep) -> Iterator[ShrinkFirst]:
        if step.named:  # names cannot say it
            return
        enabled = ShrinkFirst(enabled=True)
        made = step.traced.rewritten(Choice(step.target, (enabled,)))
        if made.did(ShrinkFirst):
            yield enabled


def _fenced(body, given: InputShardings | None):
    """The body with its barriers; None where there are none."""
    graph, size = JaxprGraph(body), shardings_in(body, given).bytes_of
    late = {i: partial(_after, i, first) for i, first in _waits(graph, size).items()}
    return done_otherwise(body, graph, late) if late else None


def _after(i: int, first: list[int], values: Values) -> list[Any]:
    """Equation `i`, an operand of which waits behind a barrier for what comes first."""
    eqns = values.graph.eqns
    for k in first:
        values.evaluate(k)
    results = [v for k in first for v in eqns[k].outvars]
    operands = _own(values.graph, i, first)
    held = [*operands, *results]
    through = barrier([values.read(v) for v in held])
    own = dict(zip(operands, through, strict=False))
    # whoever reads them does so behind the barrier: XLA drops from one what nobody
    # reads there
    values.env.update(zip(results, through[len(operands) :], strict=True))
    read = lambda v: own[v] if v in operands else values.read(v)
    return _compat.bind(eqns[i], [read(v) for v in eqns[i].invars])


def _own(graph: JaxprGraph, i: int, first: Iterable[int]) -> list[Any]:
    """Operands of equation `i` that make it wait: what the others read too is left.

    Devices that gather such an operand would gather it twice, before and behind.
    """
    every = list(filter(is_var, graph.eqns[i].invars))
    shared = set[Any]().union(*(_sources(graph, k) for k in first))
    return [v for v in every if _source(graph, v) not in shared] or every


def _waits(graph: JaxprGraph, size: Callable[[Any], int]) -> dict[int, list[int]]:
    """Product that makes much -> those that it is to wait for."""
    # `size`: bytes of a variable on one device
    dots = [i for i, e in enumerate(graph.eqns) if primitives.is_dot(e)]
    reads = {i: _sources(graph, i) for i in dots}
    made = {i: size(graph.eqns[i].outvars[0]) for i in dots}
    operands = {i: filter(is_var, graph.eqns[i].invars) for i in dots}
    read = {i: max(map(size, atoms), default=0) for i, atoms in operands.items()}
    small = [i for i in dots if read[i] >= max(LARGE, _TIMES * made[i])]
    small = [i for i in small if not _is_summed(graph, i)]
    waits: dict[int, list[int]] = {}
    for i in (i for i in dots if made[i] >= max(LARGE, _TIMES * read[i])):
        for k in (k for k in small if reads[i] & reads[k]):
            # no circle: neither may need the other, by operands or by a wait found
            # before
            apart = k not in _before(graph, [i], waits)
            if apart and i not in _before(graph, [k], waits):
                waits.setdefault(i, []).append(k)
    return waits


def _is_summed(graph: JaxprGraph, i: int) -> bool:
    """Whether devices may sum what a product gives, as the user's constraint asks.

    Where such a sum is read in parts XLA scatters it, if no barrier holds the whole.
    """
    (v,) = graph.eqns[i].outvars
    while len(users := graph.users.get(v, ())) == 1:
        eqn = graph.eqns[next(iter(users))]
        sharding = asked_by(eqn)
        if sharding is not None:
            named = {name for names in of_spec(sharding, v) for name in names}
            sizes = sharding.mesh.shape.items()
            return any(size > 1 and name not in named for name, size in sizes)
        if not primitives.of(eqn).moves:
            return False
        (v,) = eqn.outvars
    return False


def _sources(graph: JaxprGraph, i: int) -> set[Any]:
    """What an equation reads, moves and casts looked through."""
    return {_source(graph, v) for v in graph.eqns[i].invars if is_var(v)}


def _source(graph: JaxprGraph, v: Any) -> Any:
    while v in graph.maker and primitives.of(graph.eqns[graph.maker[v]]).moves:
        v = graph.eqns[graph.maker[v]].invars[0]
    return v


def _before(
    graph: JaxprGraph, ends: Iterable[int], waits: Mapping[int, list[int]]
) -> set:
    """The equations that must be done before these, by what they read or wait for."""
    todo, found = list(ends), set()
    while todo:
        i = todo.pop()
        makers = (graph.maker.get(v) for v in graph.eqns[i].invars if is_var(v))
        for k in (*makers, *waits.get(i, ())):
            if k is not None and k not in found:
                found.add(k)
                todo.append(k)
    return found
