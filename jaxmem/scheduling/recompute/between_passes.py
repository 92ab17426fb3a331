"""What a list of equations keeps from its forward to its backward pass."""

import itertools
from collections.abc import Set
from typing import Any

from jaxmem.ir import primitives
from jaxmem.ir.fused import is_fused
from jaxmem.ir.graph import JaxprGraph, is_transposed
from jaxmem.ir.scans import is_var


def kept_between(graph: JaxprGraph, late: Set[int]) -> list[Any]:
    """Values of the forward pass that the backward pass reads, in order of reading.

    Without what an update reads alone: XLA makes that where it is read. Without what
    is read before another product, as in the loss: nothing else would have the memory.
    `late`: the equations of the backward pass and what comes after it.
    """
    last = max((i for i in late if is_transposed(graph.eqns[i])), default=-1)
    readers: dict[Any, int] = {}  # variable -> the last equation that reads it
    for i in sorted(i for i in late if i <= last):
        early = (v for v in graph.eqns[i].invars if is_var(v) and v in graph.maker)
        # what the step returns is there at the end anyway
        own = (v for v in early if graph.maker[v] not in late)
        readers.update({v: i for v in own if v not in graph.outputs})
    before = list(itertools.accumulate(map(_is_step, graph.eqns), initial=0))
    is_apart = lambda v: before[readers[v]] > before[graph.maker[v] + 1]
    return list(filter(is_apart, readers))


def is_sum(graph: JaxprGraph, v) -> bool:
    """Whether a value is made of sums or other reductions, an element of an element."""
    todo = [v]
    while todo:
        i = graph.maker.get(w := todo.pop())
        if i is None:
            return False
        eqn = graph.eqns[i]
        if primitives.is_reduction(eqn):
            continue
        own = [x for x in eqn.invars if is_var(x) and x.aval.size > 1]
        if not (own and is_fused(eqn) and all(x.aval.size == w.aval.size for x in own)):
            return False
        todo += own
    return True


def _is_step(eqn) -> bool:
    """Whether other arrays than those that it reads may take memory beside it."""
    return primitives.is_product(eqn) or primitives.is_loop(eqn)
