"""Reductions that are repeated with what they are made of.

A softmax of the backward pass can be made of scores, their maxima and their sums. Where
the two are kept of the forward pass, XLA:GPU has no single kernel for its softmax any
more, and none for the second one: that takes longer than two whole ones.
"""

from collections.abc import Iterator, Sequence

from jaxmem.ir import primitives
from jaxmem.ir.graph import JaxprGraph, late_of
from jaxmem.scheduling.predict.operations import Operations


class Reductions:
    """Operations that reduce arrays of the forward pass."""

    def __init__(self, ops: Operations):
        self._graph = ops.graph
        body = JaxprGraph(ops.closed)
        late, last = late_of(body), [places[-1] for places in ops.equations]
        found = (k for k, i in enumerate(last) if i not in late)
        self._all = {k for k in found if primitives.is_reduction(body.eqns[last[k]])}

    def repeated(self, sequence: Sequence[int]) -> list[int]:
        """The sequence, in which reductions are repeated after what they read."""
        found: list[int] = []
        seen: set[int] = set()
        for i in sequence:
            found.append(i)
            if i in seen:
                found += self._of(self._graph.operations[i].outputs)
            seen.add(i)
        return found

    def _of(self, values: Sequence[int]) -> Iterator[int]:
        """Those that can be made of these, in their order."""
        made = {*values, *self._graph.arguments}
        readers = {k for v in values for k in self._graph.readers[v]}
        for k in sorted(readers & self._all):
            operation = self._graph.operations[k]
            if made.issuperset(operation.inputs):
                made.update(operation.outputs)
                yield k
