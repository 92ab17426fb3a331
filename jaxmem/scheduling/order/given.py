"""From an order of operations back to a jaxpr, and barriers that make XLA keep it.

Each equation is evaluated once, so values are the same to the bit. A compiler schedules
anew, so after what it would put off (an update whose result nobody reads) comes a
barrier: it takes the results, and what the operations behind it read. Not ordered:
operations behind a barrier that read arguments alone.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from jaxmem._checks import check_int, check_numbers, wrong_type
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import JaxprGraph, Values
from jaxmem.ir.scans import LARGE, barrier, is_var
from jaxmem.planning import Graph
from jaxmem.scheduling.predict.operations import Operations


def in_given_order(
    ops: Operations,
    order: Sequence[int],
    fences: Iterable[int] = (),
    least: int = LARGE,
):
    """A jaxpr that does the same operations in another order.

    Args:
      ops: what `operations_of` gave.
      order: every operation of `ops.graph` once, inputs first.
      fences: places in `order` before which a barrier is put; see `fences_of`.
      least: bytes from which a result is held by a barrier.

    Returns:
      A closed jaxpr like `ops.closed`; its values are bitwise equal.

    Raises:
      ValueError: `order` is none.
    """
    order = check_operations(ops).graph.check_order(order)
    fences = check_numbers("fences", fences)
    least = check_int("least", least, 0)
    graph = JaxprGraph(ops.closed)
    held = _held(ops.graph, order, fences, least)
    tied = _tied(graph)
    kept = {v for v in ops.variables if v is not None}

    def run(args: list) -> list:
        values = _Replayed(graph, graph.inputs(args), kept=kept, tied=tied)
        for place, i in enumerate(order):
            if place in held:
                variables = (ops.variables[v] for v in held[place])
                values.fence([v for v in variables if v is not None])
            for k in ops.equations[i]:
                values.evaluate(k)
        return [values.read(v) for v in graph.outvars]

    return jaxprs.retrace(ops.closed, run)


def fences_of(graph: Graph, order: Sequence[int], least: int = LARGE) -> list[int]:
    """Where in an order barriers are worth it.

    A barrier comes as soon as `least` bytes of results are there, and the next
    operation does more than finish results.

    Args:
      graph: the graph.
      order: every operation once, inputs first.
      least: bytes of results between two barriers.

    Returns:
      Places in `order`, ascending.
    """
    if not isinstance(graph, Graph):
        raise wrong_type("graph", graph, "a jaxmem.planning.Graph")
    order = graph.check_order(order)
    least = check_int("least", least, 0)
    outputs, found, done = set(graph.outputs), [], 0
    for place, i in enumerate(order[:-1]):
        done += graph.bytes_of(outputs & set(graph.operations[i].outputs))
        following = graph.operations[order[place + 1]].outputs
        if done >= least and not outputs.issuperset(following):
            found.append(place + 1)
            done = 0
    return found


def check_operations(ops: Any) -> Operations:
    """What `operations_of` gave; TypeError for anything else."""
    if not isinstance(ops, Operations):
        raise wrong_type("ops", ops, "Operations, of operations_of(...)")
    return ops


def _held(
    graph: Graph, order: Sequence[int], fences: Iterable[int], least: int
) -> dict[int, list[int]]:
    """Place -> what its barrier holds: the latest results, and what flows on."""
    edges = sorted({f for f in fences if 0 < f < len(order)})
    outputs, found, since = set(graph.outputs), {}, 0
    for edge, end in zip(edges, [*edges, len(order)][1:], strict=True):
        earlier, made = _made(graph, order[:edge]), _made(graph, order[since:edge])
        read = {v for i in order[edge:end] for v in graph.operations[i].inputs}
        done = [v for v in made if v in outputs and graph.values[v].bytes >= least]
        flows = [v for v in earlier if v in read and graph.values[v].bytes]
        # a barrier does something only between what is to be done and what waits
        if done and flows:
            found[edge] = list(dict.fromkeys([*done, *flows]))
        since = edge
    return found


def _made(graph: Graph, operations: Iterable[int]) -> dict[int, None]:
    return dict.fromkeys(v for i in operations for v in graph.operations[i].outputs)


@dataclass
class _Replayed(Values):
    """Values of which those that do not exist in memory can be forgotten."""

    kept: Set[Any] = frozenset()  # the variables that exist
    # the outputs of the jaxpr's own barriers -> what they let through
    tied: Mapping[Any, Any] = field(default_factory=dict)
    # what has been computed of others since they were last forgotten
    inside: list[int] = field(default_factory=list)

    def put(self, i: int, outs: Sequence[Any]) -> None:
        super().put(i, outs)
        made = self.graph.eqns[i].outvars
        if not any(v in self.kept or v in self.tied for v in made):
            self.inside.append(i)

    def fence(self, held: Sequence[Any]) -> None:
        """Ties values together; what is behind reads them, and computes of them."""
        # arrays that never exist in memory are recomputed behind it, as XLA does in
        # each kernel
        through = barrier([self.env[v] for v in held])
        new = dict(zip(held, through, strict=True))
        tied = {w: new[v] for w, v in self.tied.items() if w in self.env and v in new}
        self.env.update(new | tied)
        for i in self.inside:
            self.done.discard(i)
            for v in self.graph.eqns[i].outvars:
                self.env.pop(v, None)
        self.inside.clear()


def _tied(graph: JaxprGraph) -> dict[Any, Any]:
    """Outputs of barriers, and the variables that go in."""
    barriers = (e for e in graph.eqns if primitives.is_barrier(e))
    pairs = (zip(e.outvars, e.invars, strict=True) for e in barriers)
    # a literal is no value of the graph: what a barrier made of it stays as it is
    return {w: v for pair in pairs for w, v in pair if is_var(v)}
