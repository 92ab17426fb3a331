"""Arrays that a loop makes part by part, for use after it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax

from jaxmem.scheduling.tiling.sums import constant


class WrittenParts:
    """Arrays that are cut, of which each iteration of a scan makes one part.

    Where parts lie one behind the other, they are what the scan stacks. Others are
    written to a buffer that is carried, since a stack of them would be transposed.
    """

    def __init__(self, axis: Mapping[Any, int]):
        """`axis`: of each variable, the axis along which it is cut."""
        self.axis = axis
        is_stacked = lambda v: math.prod(v.aval.shape[: axis[v]]) == 1
        self.stacked = [v for v in axis if is_stacked(v)]
        self.placed = [v for v in axis if not is_stacked(v)]

    def buffers(self) -> list[Any]:
        """What is carried before the first part."""
        return [constant(v.aval, 0, v.aval.dtype) for v in self.placed]

    def write(
        self, buffers: Sequence[Any], part, values: Mapping[Any, Any]
    ) -> tuple[list[Any], list[Any]]:
        """The buffers with part number `part` in them, and what the scan stacks."""
        new = []
        for buffer, v in zip(buffers, self.placed, strict=True):
            x, axis = values[v], self.axis[v]
            start = part * x.shape[axis]
            new.append(lax.dynamic_update_slice_in_dim(buffer, x, start, axis))
        return new, [values[v] for v in self.stacked]

    def whole(self, buffers: Sequence[Any], stacks: Sequence[Any]) -> dict[Any, Any]:
        """The arrays after the last part."""
        found = dict(zip(self.placed, buffers, strict=True))
        for v, y in zip(self.stacked, stacks, strict=True):
            found[v] = y.reshape(v.aval.shape)
        return found
