"""What is alive on one device while equations run, whole and in parts.

What is fused into all that reads it has no bytes of its own; what it is made from then
lives until it is read.
"""

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from jaxmem.ir import primitives
from jaxmem.ir.fused import is_fused
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.scans import is_var
from jaxmem.ir.shards import WHOLE, Shardings


class LiveBytes:
    """Live ranges of what a list of equations makes, in the order of the list."""

    def __init__(
        self,
        graph: JaxprGraph,
        shardings: Shardings = WHOLE,
        within: Collection[int] | None = None,
    ):
        """`within`: positions of the equations that run; all of them, if None."""
        self.graph, self.shardings = graph, shardings
        self.count = len(graph.eqns)
        every = range(self.count) if within is None else sorted(within)
        self.made = {v: i for i in every for v in graph.eqns[i].outvars}
        self.death: dict[Any, int] = {}  # the first equation at which it is not there
        outputs = graph.outputs if within is None else set()
        for i in reversed(every):
            eqn = graph.eqns[i]
            # the result may lie where an operand was
            end = i if is_fused(eqn) or primitives.of(eqn).into_first else i + 1
            for v in eqn.outvars:
                self.death[v] = max(self.death.get(v, i + 1), i + 1)
                self.death[v] = self.count if v in outputs else self.death[v]
                if not self._has_bytes(eqn, v):
                    end = max(end, self.death[v])
            for v in filter(is_var, eqn.invars):
                self.death[v] = max(self.death.get(v, 0), end)

    def _has_bytes(self, eqn, v) -> bool:
        """Whether what an equation makes is written to memory."""
        readers = [self.graph.eqns[i] for i in self.graph.users.get(v, ())]
        if not is_fused(eqn) or v in self.graph.outputs or not readers:
            return True
        inlined = lambda e: is_fused(e) or primitives.is_reduction(e)
        return not all(map(inlined, readers))

    @cached_property
    def sizes(self) -> dict[Any, float]:
        """Bytes on one device of what has any."""
        made = ((v, self.graph.eqns[i]) for v, i in self.made.items())
        has = (v for v, eqn in made if self._has_bytes(eqn, v))
        return {v: float(self.shardings.bytes_of(v)) for v in has}

    @cached_property
    def whole(self) -> np.ndarray:
        return self.profile(self.sizes)

    def profile(self, sizes: Mapping[Any, float]) -> np.ndarray:
        """Bytes alive at each equation of these variables."""
        changes = np.zeros(self.count + 1)
        for v, size in sizes.items():
            changes[self.made[v]] += size
            changes[self.death[v]] -= size
        return changes.cumsum()[:-1]
