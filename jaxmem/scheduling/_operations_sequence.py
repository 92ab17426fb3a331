"""From a sequence in which operations come again back to a jaxpr.

What comes again stands behind a barrier, with what was made right before it: without
it XLA would find that the values are there already, and keep them from their first
making. Runs of operations that come again share one barrier. Later readers see the
newest making of a value, so the old one can go.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from jaxmem import _compat, _jaxpr
from jaxmem.scheduling import _graph
from jaxmem.scheduling._operations import Operations
from jaxmem.scheduling._scans import barrier, is_var


def in_sequence(ops: Operations, sequence: Sequence[int]):
    """A jaxpr that does operations in this sequence, some of them more than once.

    Args:
      ops: what `operations_of` gave.
      sequence: numbers of operations of `ops.graph`: each at least once, and each value
        made before it is read (`planning.sequence_profile` checks both).

    Returns:
      A closed jaxpr like `ops.closed`; its values are the same to the bit.
    """
    graph = _graph.Graph(ops.closed)
    runs = list(_runs(sequence))

    def run(args: list) -> list:
        state = _State(ops, graph, graph.inputs(args))
        for operations, again in runs:
            if again:
                state.fence(operations)
            for i in operations:
                state.do(i)
        return [state.read(v, {}) for v in graph.outvars]

    return _jaxpr.retrace(ops.closed, run)


def _runs(sequence: Sequence[int]) -> Iterator[tuple[list[int], bool]]:
    """Neighbours that are all done for the first time, or all again."""
    seen: set[int] = set()
    run: list[int] = []
    again = False
    for i in sequence:
        if (i in seen) != again:
            if run:
                yield run, again
            run, again = [], i in seen
        run.append(i)
        seen.add(i)
    if run:
        yield run, again


@dataclass
class _State:
    """The newest making of each array that exists.

    Attributes:
      env: by variable.
      newest: an array that the last operation has made.
    """

    ops: Operations
    graph: _graph.Graph
    env: dict[Any, Any]
    newest: Any = None
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
        """Operation `i`, of the newest values."""
        inside: dict[Any, Any] = {}
        for k in self.ops.equations[i]:
            if not all(v in inside for v in self.graph.eqns[k].outvars):
                self._evaluate(k, inside)
        mine = self.ops.graph.operations[i].outputs
        made = {v: x for v, x in inside.items() if self._number(v) in mine}
        self.env.update(made)
        floats = [x for x in made.values() if jnp.issubdtype(x.dtype, jnp.floating)]
        self.newest = max(floats, key=lambda x: x.size, default=self.newest)

    def fence(self, operations: Sequence[int]) -> None:
        """What these operations read from outside is not there before `newest` is."""
        numbers = {v for i in operations for v in self.ops.graph.operations[i].outputs}
        read = {v for i in operations for v in self.ops.graph.operations[i].inputs}
        variables = [self.ops.variables[v] for v in sorted(read - numbers)]
        held = [v for v in variables if v is not None and v in self.env]
        made = [v for v in held if v in self.graph.maker]
        held = made or held[:1]  # one argument will do where there is nothing else
        if held and self.newest is not None:
            through = barrier([*(self.env[v] for v in held), self.newest])
            self.env.update(zip(held, through, strict=False))

    def _number(self, v) -> int | None:
        """Of a variable that exists in memory under its own name."""
        return self.ops.values.get(v) if v in self.exist else None

    def _evaluate(self, k: int, inside: dict[Any, Any]) -> None:
        eqn = self.graph.eqns[k]
        outs = _compat.bind(eqn, [self.read(v, inside) for v in eqn.invars])
        inside.update(zip(eqn.outvars, outs, strict=True))
