"""What a `cond` of the forward pass leaves for one of the backward pass.

Both choose by one value, so the branch of the second that is taken can recompute what
the same branch of the first would have kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.ir.branch_parts import BRANCHES
from jaxmem.ir.graph import JaxprGraph, Values, is_transposed
from jaxmem.ir.nested_parts import made_apart
from jaxmem.ir.propagation import shardings_in
from jaxmem.ir.scans import is_var
from jaxmem.scheduling._choice import Rate
from jaxmem.scheduling._pass import Level, Pass
from jaxmem.scheduling.plan.rows import Description, recomputed, residual
from jaxmem.scheduling.recompute.minimum_cut import needed, price_at
from jaxmem.scheduling.recompute.pairs import Cut, Pair, cut
from jaxmem.scheduling.recompute.unrolled import not_kept


@dataclass(frozen=True)
class InBranches:
    """What a `cond` of the backward pass recomputes."""

    name: ClassVar[str] = "in_branches"
    # as `Recompute.rate`
    rate: Rate | None = None


class RecomputeInBranches(Pass[InBranches, tuple[Any, Pair, Cut]]):
    """Residuals of a `cond` are recomputed in the `cond` that reads them."""

    config = InBranches

    def analyse(self, level: Level, config: InBranches) -> Iterator[Any]:
        both = in_parts(level)
        if both is None:
            return
        jaxpr, pair = both
        found = cut(pair, price_at(config.rate, level.target))
        # the compiler's order may hold one of them more in the backward pass
        own = pair.inside().bytes_of
        more = 0 if level.compared else max(map(own, pair.slots.values()))
        if found.cost + more < pair.bytes:
            yield jaxpr, pair, found

    def apply(self, level: Level, rewrite: tuple[Any, Pair, Cut]) -> Any:
        jaxpr, pair, found = rewrite
        run = lambda args: _Recomputed.of(pair, found, args).all_outputs()
        return _compat.without_dead_code(jaxprs.retrace(jaxpr, run))

    def describe(self, rewrite: tuple[Any, Pair, Cut], target: str) -> Description:
        _, pair, found = rewrite
        gone, here = not_kept(pair, found), {*pair.slots.values()}
        maker = lambda v: pair.body.eqns[pair.body.maker[v]]
        eqns = [pair.body.eqns[i] for i in found.recomputed]
        paid = [(eqn, 1) for eqn in eqns if pair.is_paid(eqn)]
        way = "computed from" if paid else "elementwise of"
        how = f"{way} other residuals"
        row = lambda v, how, sign: residual(v.aval, maker(v), how, sign, pair.shards(v))
        rows = [row(v, how, 1) for v in gone]
        kept = (v for v in found.variables if v not in here)
        rows += [row(v, "others are computed from it", -1) for v in kept]
        again = recomputed(paid, target, pair.inside())
        return Description(residuals=tuple(rows), recomputed=again)


def in_parts(level: Level) -> tuple[Any, Pair] | None:
    """The list of equations with its `cond`s in parts, and what is left between them.

    None where nothing is.
    """
    graph = JaxprGraph(level.jaxpr)
    left = list(_left(graph))
    if not left:
        return None
    jaxpr = made_apart(level.jaxpr, graph, left)
    graph = JaxprGraph(jaxpr)
    inside = partial(shardings_in, jaxpr, level.shardings)
    return jaxpr, replace(_pair(graph), inside=inside)


def _readers(graph: JaxprGraph) -> Iterator[tuple[Any, Any]]:
    """(variable, the predicate of the `cond`) of what only backward ones read."""
    for v, users in graph.users.items():
        eqns = [graph.eqns[i] for i in users]
        first, *others = [BRANCHES.key(e) if is_transposed(e) else None for e in eqns]
        # under a second predicate it would have to be recomputed in two `cond`s
        if v in graph.maker and v not in graph.outputs and {*others} <= {first}:
            yield v, first


def _left(graph: JaxprGraph) -> Iterator[Any]:
    """What a forward `cond` makes, and one of the same predicate alone reads."""
    for v, key in _readers(graph):
        eqn = graph.eqns[graph.maker[v]]
        if key is not None and BRANCHES.key(eqn) == key and not is_transposed(eqn):
            yield v


def _pair(graph: JaxprGraph) -> Pair:
    """The two passes of a list, with what is left from one `cond` to another."""
    slots = dict(enumerate(_left(graph)))
    late = {i for i, e in enumerate(graph.eqns) if is_transposed(e)}
    read = {v for i in late for v in graph.eqns[i].invars if is_var(v)}
    # what else the backward pass reads is there whatever becomes of the slots
    free = {*graph.invars, *graph.outputs, *(read - {*slots.values()})}
    # of no scans: both passes are in one list, and run once
    return Pair(-1, -1, graph, slots, {}, free, (), (), 1)


@dataclass
class _Recomputed(Values):
    """Values, of which backward `cond`s are given what was recomputed for them."""

    pair: Pair = field(kw_only=True)
    kept: frozenset[Any] = field(kw_only=True)

    @classmethod
    def of(cls, pair: Pair, found: Cut, args: Sequence[Any]) -> "_Recomputed":
        inputs = pair.body.inputs(args)
        return cls(pair.body, inputs, pair=pair, kept=frozenset(found.variables))

    def apply(self, i: int) -> None:
        eqn, known = self.graph.eqns[i], {*self.kept, *self.pair.free}
        wanted = {*self.pair.slots.values()} - known
        gone = [v for v in eqn.invars if is_var(v) and v in wanted]
        if not gone:
            super().apply(i)
            return
        made = needed(self.graph, gone, known)
        read = {v for k in made for v in self.graph.eqns[k].invars if is_var(v)}
        inside = Values(self.graph, {v: self.read(v) for v in read & known})
        inside.recompute(made)
        values = [inside.read(v) if v in gone else self.read(v) for v in eqn.invars]
        self.put(i, _compat.bind(eqn, values))
