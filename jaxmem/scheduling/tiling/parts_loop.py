"""The loop over parts: sums are carried, and what is cut is written part by part."""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.ir.graph import JaxprGraph, Values
from jaxmem.scheduling.tiling.shard_parts import Parts
from jaxmem.scheduling.tiling.sums import constant


class PartsLoop:
    """A scan that makes arrays part by part, for use after it.

    Where parts lie one behind the other, they are what the scan stacks. Others are
    written to a buffer that is carried, since a stack of them would be transposed.
    """

    def __init__(self, axis: Mapping[Any, int], parts: Parts):
        """`axis`: of each variable, the axis along which `parts` cut it."""
        self.axis, self.n = axis, parts.n
        self.sharded = parts if parts.shards > 1 else None
        in_order = self.sharded is None
        is_stacked = lambda v: in_order and math.prod(v.aval.shape[: axis[v]]) == 1
        self.stacked = [v for v in axis if is_stacked(v)]
        self.placed = [v for v in axis if not is_stacked(v)]

    def run(
        self, scope: str, totals: list[Any], part_of: Callable
    ) -> tuple[list[Any], dict[Any, Any]]:
        """Sums and arrays after the last part.

        Args:
          scope: the name of the loop.
          totals: the sums before the first part.
          part_of: `part_of(totals, j)`, the sums with part `j`, and its values.
        """

        def body(carry, j):
            totals, buffers = carry
            totals, values = part_of(totals, j)
            buffers, stacks = self._write(buffers, j, values)
            return (totals, buffers), stacks

        steps = jnp.arange(self.n, dtype=jnp.int32)
        with jax.named_scope(scope):
            carry = totals, self._buffers()
            (totals, buffers), stacks = lax.scan(body, carry, steps)
        return totals, self._whole(buffers, stacks)

    def _buffers(self) -> list[Any]:
        """What is carried before the first part."""
        whole = [constant(v.aval, 0, v.aval.dtype) for v in self.placed]
        if self.sharded is None:
            return whole
        of = zip(whole, self.placed, strict=True)
        return [x.reshape(self.sharded.view(x.shape, self.axis[v])) for x, v in of]

    def _write(
        self, buffers: Sequence[Any], part, values: Mapping[Any, Any]
    ) -> tuple[list[Any], list[Any]]:
        """The buffers with part number `part` in them, and what the scan stacks."""
        new = []
        for buffer, v in zip(buffers, self.placed, strict=True):
            x, axis = values[v], self.axis[v]
            if self.sharded is not None:
                new.append(self.sharded.put(buffer, x, axis, part))
                continue
            start = part * x.shape[axis]
            new.append(lax.dynamic_update_slice_in_dim(buffer, x, start, axis))
        return new, [values[v] for v in self.stacked]

    def _whole(self, buffers: Sequence[Any], stacks: Sequence[Any]) -> dict[Any, Any]:
        """The arrays after the last part."""
        pairs = zip(self.placed, buffers, strict=True)
        found = {v: x.reshape(v.aval.shape) for v, x in pairs}
        for v, y in zip(self.stacked, stacks, strict=True):
            found[v] = y.reshape(v.aval.shape)
        return found


def around(
    graph: JaxprGraph,
    args: Sequence[Any],
    inside: Set[int],
    after: Set[int],
    looped: Callable[[Values], dict[Any, Any]],
) -> list[Any]:
    """The outputs of a graph of which a loop does what is `inside`, before the `after`.

    `looped` gives what the loop makes, from the values before it.
    """
    values = Values(graph, graph.inputs(args))
    others = [i for i in range(len(graph.eqns)) if i not in inside]
    for i in others:
        if i not in after:
            values.evaluate(i)
    values.env.update(looped(values))
    values.done |= inside
    for i in others:
        values.evaluate(i)
    return [values.read(v) for v in graph.outvars]
