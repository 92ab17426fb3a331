"""Arrays that a loop makes part by part, for use after it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax

from jaxmem.scheduling.tiling.shard_parts import Parts
from jaxmem.scheduling.tiling.sums import constant


class WrittenParts:
    """Arrays that are cut, of which each iteration of a scan makes one part.

    Where parts lie one behind the other, they are what the scan stacks. Others are
    written to a buffer that is carried, since a stack of them would be transposed.
    """

    def __init__(self, axis: Mapping[Any, int], parts: Parts | None = None):
        """`axis`: of each variable, the axis along which it is cut.

        `parts`: how it is cut; None for slices that lie one behind the other.
        """
        self.axis = axis
        self.spread = parts if parts and parts.shards > 1 else None
        in_order = self.spread is None
        is_stacked = lambda v: in_order and math.prod(v.aval.shape[: axis[v]]) == 1
        self.stacked = [v for v in axis if is_stacked(v)]
        self.placed = [v for v in axis if not is_stacked(v)]

    def buffers(self) -> list[Any]:
        """What is carried before the first part."""
        whole = [constant(v.aval, 0, v.aval.dtype) for v in self.placed]
        if self.spread is None:
            return whole
        of = zip(whole, self.placed, strict=True)
        return [x.reshape(self.spread.view(x.shape, self.axis[v])) for x, v in of]

    def write(
        self, buffers: Sequence[Any], part, values: Mapping[Any, Any]
    ) -> tuple[list[Any], list[Any]]:
        """The buffers with part number `part` in them, and what the scan stacks."""
        new = []
        for buffer, v in zip(buffers, self.placed, strict=True):
            x, axis = values[v], self.axis[v]
            if self.spread is not None:
                new.append(self.spread.put(buffer, x, axis, part))
                continue
            start = part * x.shape[axis]
            new.append(lax.dynamic_update_slice_in_dim(buffer, x, start, axis))
        return new, [values[v] for v in self.stacked]

    def whole(self, buffers: Sequence[Any], stacks: Sequence[Any]) -> dict[Any, Any]:
        """The arrays after the last part."""
        pairs = zip(self.placed, buffers, strict=True)
        found = {v: x.reshape(v.aval.shape) for v, x in pairs}
        for v, y in zip(self.stacked, stacks, strict=True):
            found[v] = y.reshape(v.aval.shape)
        return found
