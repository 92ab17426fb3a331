"""The pass that updates a large leaf's parameter in the loop over its rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.ir.graph import JaxprGraph, Values
from jaxmem.ir.placements import Placements
from jaxmem.ir.placements.layers import made_of
from jaxmem.ir.placements.lower import Form, PartValues
from jaxmem.ir.row_chunks import on_platforms
from jaxmem.ir.scans import is_var
from jaxmem.scheduling._pass import Level, Pass
from jaxmem.scheduling.row_chunks.analysis import ROWS, LeafUpdate, leaf_updates


@dataclass(frozen=True)
class RowChunks:
    """Nothing can be chosen: the loop is there already, and has more in it."""

    name: ClassVar[str] = "row_chunks"


class UpdateInRows(Pass[RowChunks, tuple[LeafUpdate, ...]]):
    """What is done to large leaves' updates, in the loops that make them."""

    config = RowChunks

    def analyse(
        self, level: Level, config: RowChunks
    ) -> Iterator[tuple[LeafUpdate, ...]]:
        del config
        found = tuple(leaf_updates(level.jaxpr, level.aliases))
        if found:
            yield found

    def apply(self, level: Level, rewrite: tuple[LeafUpdate, ...]):
        del level
        closed = rewrite[0].jaxpr  # that of all
        graph = JaxprGraph(closed)
        first = {i: plan.moved[0] for plan in rewrite for i in plan.moved}
        plans = {plan.moved[0]: plan for plan in rewrite}

        def run(args: list) -> list:
            inputs = graph.inputs(args)
            return _LoopedValues(graph, inputs, plans=plans, first=first).all_outputs()

        return _compat.without_dead_code(jaxprs.retrace(closed, run))


@dataclass
class _LoopedValues(Values):
    """Values so far, with the loops in the place of the updates."""

    plans: Mapping[int, LeafUpdate] = field(kw_only=True)
    # of each equation in a loop the first one of it, with which all are done
    first: Mapping[int, int] = field(kw_only=True)

    def evaluate(self, i: int) -> None:
        super().evaluate(self.first.get(i, i))

    def _missing(self, i: int) -> list[int]:
        before = dict.fromkeys(self.first.get(k, k) for k in super()._missing(i))
        return [k for k in before if k not in self.done]

    def apply(self, i: int) -> None:
        if i in self.plans:
            self._loop(self.plans[i])
        else:
            super().apply(i)

    def _loop(self, plan: LeafUpdate) -> None:
        buffers = list(plan.pairs.values())
        for v in buffers:  # everyone else who reads what is overwritten does so first
            for u in self.graph.users.get(v, ()):
                if u not in plan.placements:
                    self.evaluate(u)
        carried = [self.read(v) for v in buffers]
        read = [self.read(v) for v in plan.read]
        fn = _Loop(self, plan)
        fn.outside()
        outs = on_platforms(fn, plan.chunks, plan.platforms, carried, read)
        self.env.update(zip(plan.pairs, outs, strict=True))


# Hashed by identity, as loops want of a function. JAX asks a function for its text,
# which would be that of the whole step.
@dataclass(eq=False, repr=False)
class _Loop:
    """An iteration: rows of the buffers as they are after the update."""

    values: _LoopedValues
    plan: LeafUpdate

    def outside(self) -> None:
        """Evaluates what all rows share, before the loop."""
        graph = self.values.graph
        for i in self.plan.moved:
            self._shared(graph.eqns[i], self.plan.placements[i])
        for v in self.plan.made:
            placed = made_of(graph, v, 0)
            assert placed is not None
            self._shared(graph.eqns[graph.maker[v]], placed)

    def _shared(self, eqn, placed: Placements) -> None:
        for v, axis in placed.operands(eqn):
            if is_var(v) and axis is None:
                self.values.read(v)

    def __call__(self, lead, carried: list, read: list) -> list:
        parts = carried[0].shape[:2] if self._in_parts(lead) else ()
        merged = lambda x: x.reshape(-1, *x.shape[2:]) if parts else x
        places = [*self.plan.pairs.values(), *self.plan.read]
        arrays = list(map(merged, [*carried, *read]))
        pairs = zip(places, arrays, strict=True)
        env: dict[Form, Any] = {(v, ROWS): x for v, x in pairs}
        length, graph = lambda _: arrays[0].shape[0], self.values.graph
        rows = PartValues(self.values.read, _unread, length, env=env, graph=graph)
        for i in self.plan.moved:
            rows.run(graph.eqns[i], self.plan.placements[i])
        outs = [env[v, ROWS] for v in self.plan.pairs]
        return [x.reshape(*parts, *x.shape[1:]) if parts else x for x in outs]

    def _in_parts(self, lead) -> bool:
        """Whether rows of several parts come along an axis of their own."""
        return lead is not None and self.plan.chunks.outer > 1


def _unread(v, axis: int, whole):
    del axis, whole
    raise AssertionError(v)  # all that no operation makes is carried or read
