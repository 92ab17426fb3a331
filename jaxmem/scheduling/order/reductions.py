"""Reductions that are repeated with what they are made of.

A softmax of the backward pass can be made of scores, their maxima and their sums. Where
the two are kept of the forward pass, XLA:GPU has no single kernel for its softmax any
more, and none for the second one: that takes longer than two whole ones. What the step
itself keeps for its backward pass, such as a norm's mean, stays as it is.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

from jaxmem.ir import primitives
from jaxmem.ir.graph import JaxprGraph, late_of
from jaxmem.scheduling.predict.operations import Operations


def with_reductions(ops: Operations, sequence: Sequence[int]) -> list[int]:
    """The sequence, in which reductions are repeated after what they read."""
    reductions = _Reductions(ops)
    found: list[int] = []
    seen: set[int] = set()
    for i in map(int, sequence):
        found.append(i)
        if i in seen:
            found += reductions.of(ops.graph.operations[i].outputs)
        seen.add(i)
    return found


class _Reductions:
    """Operations that reduce arrays of the forward pass, for it alone."""

    def __init__(self, ops: Operations):
        self._ops = ops
        self._graph = JaxprGraph(ops.closed)
        self._late = late_of(self._graph)

    def of(self, values: Sequence[int]) -> Iterator[int]:
        """Those that can be made of these, in their order."""
        made = {*values, *self._ops.graph.arguments}
        readers = {k for v in values for k in self._ops.graph.readers[v]}
        for k in sorted(readers & self._all):
            operation = self._ops.graph.operations[k]
            if made.issuperset(operation.inputs):
                made.update(operation.outputs)
                yield k

    @cached_property
    def _all(self) -> set[int]:
        return {k for k, at in enumerate(self._ops.equations) if self._is_one(at[-1])}

    def _is_one(self, i: int) -> bool:
        eqn = self._graph.eqns[i]
        if i in self._late or not primitives.is_reduction(eqn):
            return False
        return True
