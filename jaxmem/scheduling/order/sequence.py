"""From a sequence in which operations are repeated back to a jaxpr.

A repeated operation stands behind a barrier, with what is furthest along of what was
made before it: without it XLA would find that the values are there already, and keep
the first ones. Later readers see the newest value, so the old one can be freed.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.operands_first import operands_first
from jaxmem.ir.scans import barrier, is_var
from jaxmem.planning import Graph
from jaxmem.planning.remat.sequence import check_sequence
from jaxmem.scheduling.predict.operations import Operations


def in_sequence(ops: Operations, sequence: Sequence[int]):
    """A jaxpr that does operations in this sequence, some of them more than once."""
    # Each at least once, and each value made before it is read; values are the same to
    # the bit. A plan's sequence may be anybody's.
    sequence = check_sequence(ops.graph, sequence)
    graph = JaxprGraph(ops.closed)
    runs, readers = list(_runs(sequence)), _Readers(ops.graph, sequence)

    def run(args: list) -> list:
        state = _NewestValues(ops, graph, graph.inputs(args), readers)
        for operations, repeated in runs:
            if repeated:
                state.fence(operations)
            for i in operations:
                state.do(i)
        return [state.read(v, {}) for v in graph.outvars]

    return jaxprs.retrace(ops.closed, run)


def _runs(sequence: Sequence[int]) -> Iterator[tuple[list[int], bool]]:
    """Neighbours that are all done for the first time, or all repeated."""
    seen: set[int] = set()
    run: list[int] = []
    repeated = False
    for i in sequence:
        if (i in seen) != repeated:
            if run:
                yield run, repeated
            run, repeated = [], i in seen
        run.append(i)
        seen.add(i)
    if run:
        yield run, repeated


class _Readers:
    """Which values are read from some place of a sequence on, as they are there."""

    def __init__(self, graph: Graph, sequence: Sequence[int]):
        self._events: dict[int, list[tuple[int, bool]]] = defaultdict(list)
        for place, i in enumerate(sequence):
            operation = graph.operations[i]
            for v in dict.fromkeys(operation.inputs):
                self._events[v].append((place, True))
            for v in operation.outputs:
                self._events[v].append((place, False))
        for v in graph.outputs:
            self._events[v].append((len(sequence), True))

    def wait(self, value: int, place: int) -> bool:
        """Whether a value is read before it is computed again."""
        events = self._events[value]
        following = bisect.bisect_left(events, (place, False))
        return following < len(events) and events[following][1]


@dataclass
class _NewestValues:
    """The newest making of each array that exists."""

    ops: Operations
    graph: JaxprGraph
    env: dict[Any, Any]  # by variable
    readers: _Readers  # of the values
    # how many operations one after another have led to an array
    depth: dict[int, int] = field(default_factory=dict)
    place: int = 0  # in the sequence
    # what was made of the same values for another reader, by equation and values
    made: dict[tuple[int, ...], tuple[Any, Any]] = field(default_factory=dict)
    exist: set[Any] = field(init=False)

    def __post_init__(self):
        self.exist = {v for v in self.ops.variables if v is not None}

    def read(self, atom, inside: dict[Any, Any]):
        """A value; what does not exist in memory is computed by who reads it."""
        if not is_var(atom):
            return atom.val
        if atom in inside:
            return inside[atom]
        if atom in self.env:
            return self.env[atom]
        self._evaluate(self.graph.maker[atom], inside)
        return inside[atom]

    def do(self, i: int) -> None:
        inside: dict[Any, Any] = {}
        for k in self.ops.equations[i]:
            if not all(v in inside for v in self.graph.eqns[k].outvars):
                self._evaluate(k, inside)
        operation = self.ops.graph.operations[i]
        made = {v: x for v, x in inside.items() if self._number(v) in operation.outputs}
        self.env.update(made)
        depth = 1 + max((self.depth.get(v, 0) for v in operation.inputs), default=0)
        self.depth.update(dict.fromkeys(operation.outputs, depth))
        self.place += 1

    def fence(self, operations: Sequence[int]) -> None:
        """None of these operations can be done before all else that was begun."""
        # XLA drops from a barrier what nobody reads behind it: it holds only what is
        # read later, and whoever reads it reads it from there. Neighbours share one
        # barrier.
        held, furthest = self._tied(operations), self._furthest()
        if not held or furthest is None:
            return
        held = list(dict.fromkeys([*held, furthest]))
        variables = [self.ops.variables[v] for v in held]
        through = barrier([self.env[v] for v in variables])
        self.env.update(zip(variables, through, strict=True))
        self.depth.update(dict.fromkeys(held, 1 + self.depth[furthest]))

    def _furthest(self) -> int | None:
        """The value, of those still read, to which most operations have led."""
        there = (v for v in self.depth if self._there(v))
        waiting = [v for v in there if self.readers.wait(v, self.place)]
        floats = [v for v in waiting if self._is_float(v)]
        return max(floats, key=self.depth.__getitem__, default=None)

    def _is_float(self, value: int) -> bool:
        return jnp.issubdtype(self.ops.variables[value].aval.dtype, jnp.floating)

    def _tied(self, operations: Sequence[int]) -> list[int]:
        """Values from before that each of the operations reads, if through others."""
        # All that the step has made; of what it was given, what is cast, since the cast
        # of the first time would be kept, and one value for an operation that reads
        # nothing else. An operation that could be done without any of them would be, to
        # the compiler, the one that was done the first time.
        tied: dict[int, None] = {}
        since: set[int] = set()  # made by these operations, after the barrier
        for i in operations:
            operation = self.ops.graph.operations[i]
            before = [v for v in operation.inputs if v not in since and self._there(v)]
            made = [v for v in before if self.ops.variables[v] in self.graph.maker]
            tied.update(dict.fromkeys(made))
            tied.update(dict.fromkeys(self._cast_by(i, before)))
            reads = set(operation.inputs)
            if reads.isdisjoint(tied) and reads.isdisjoint(since):
                tied.update(dict.fromkeys(before[:1]))
            if not (reads.isdisjoint(tied) and reads.isdisjoint(since)):
                since.update(operation.outputs)
        return list(tied)

    def _cast_by(self, i: int, values: Sequence[int]) -> list[int]:
        """Those that an operation reads in another dtype."""
        eqns = (self.graph.eqns[k] for k in self.ops.equations[i])
        cast = (e.invars[0] for e in eqns if primitives.is_cast(e))
        numbers = {self._number(v) for v in cast if is_var(v)}
        return [v for v in values if v in numbers]

    def _there(self, value: int) -> bool:
        """Whether a value is an array that has been made by now."""
        variable = self.ops.variables[value]
        return variable is not None and variable in self.env

    def _number(self, v) -> int | None:
        """Of a variable that exists in memory under its own name."""
        return self.ops.values.get(v) if v in self.exist else None

    def _evaluate(self, i: int, inside: dict[Any, Any]) -> None:
        for k in operands_first(i, partial(self._missing, inside)):
            if not all(v in inside for v in self.graph.eqns[k].outvars):
                self._bind(k, inside)

    def _missing(self, inside: dict[Any, Any], k: int) -> list[int]:
        """The equations to do before this one, for the same reader."""
        eqn = self.graph.eqns[k]
        if all(v in inside for v in eqn.outvars):
            return []
        there = lambda v: not is_var(v) or v in inside or v in self.env
        return [self.graph.maker[v] for v in eqn.invars if not there(v)]

    def _bind(self, k: int, inside: dict[Any, Any]) -> None:
        # XLA merges what is made of the same values. Written out for each reader, a
        # layer's chain of them would be a program thirty times as long.
        eqn = self.graph.eqns[k]
        values = [self.read(v, inside) for v in eqn.invars]
        key = k, *map(id, values)
        if key not in self.made:  # beside the values, whose ids nothing else gets then
            self.made[key] = values, _compat.bind(eqn, values)
        inside.update(zip(eqn.outvars, self.made[key][1], strict=True))
