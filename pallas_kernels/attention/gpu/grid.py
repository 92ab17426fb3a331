"""The blocks that a kernel works on, and which program takes which.

A program takes one block, and the chip gives a processor the next program when one
ends: so blocks of unlike work are balanced. Where all have the same work, there are
only as many programs as processors, and each takes one block after the other: while one
ends, the tiles of the next are on their way (Shah et al., "FlashAttention-3" (2024),
and tokamax, which choose by the same rule).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chips import multiprocessors_in_context


class Grid(NamedTuple):
    """Blocks along named axes, and how many programs there are, if each takes many."""

    sizes: dict[str, int]
    programs: int | None = None

    @property
    def launched(self) -> dict[str, int]:
        return self.sizes if self.programs is None else {"program": self.programs}

    def visit(self, work: Callable[..., None]) -> None:
        """`work(*indices)` for each block of this program."""
        if self.programs is None:
            return work(*map(lax.axis_index, self.sizes))
        loop = plgpu.nd_loop(tuple(self.sizes.values()), collective_axes="program")
        loop(lambda step: work(*step.index))


def make_grid(sizes: dict[str, int], alike: bool) -> Grid:
    """Of programs that fill a processor; `alike`: whether blocks have equal work."""
    processors = multiprocessors_in_context()
    if not alike or math.prod(sizes.values()) <= processors:
        return Grid(sizes)
    return Grid(sizes, processors)
