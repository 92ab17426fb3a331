"""What XLA does otherwise for a TPU than for a GPU, as far as bytes go.

Read off compiled steps, some of which `benchmarks/predict.py` holds it against. Not
modelled: fragmentation (up to a third of what small steps take), what stays in the
chip's own memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jaxmem.chips import get_target
from jaxmem.ir import primitives
from jaxmem.ir.graph import JaxprGraph
from jaxmem.planning import Graph

# Memory is tiles of 8 rows by 128 lanes.
ROWS, LANES = 8, 128
_CONVOLUTION = "conv_general_dilated"


def is_tpu(target: str) -> bool:
    """Whether a target is one; raises where there is no target of this name."""
    return get_target(target, check=False).name.startswith("tpu")


@dataclass(frozen=True)
class Images:
    """The axes of an array that convolutions read or write."""

    count: int  # how many images
    width: int  # along the last axis of space
    features: int  # of each point

    @property
    def fill_rows(self) -> bool:
        return self.count >= ROWS

    @property
    def padding(self) -> float:
        """How often the elements' bytes they take, in tiles."""
        # Images have their number and their features as rows and lanes, or the other
        # way round; few images have the last axis of space and the features.
        rows = self.count if self.fill_rows else self.width
        usual = _tiled(rows, self.features)
        if not self.fill_rows and 2 * self.features >= LANES:
            return usual
        return min(usual, _tiled(self.features, rows))


def _tiled(rows: int, lanes: int) -> float:
    up = lambda size, unit: -(-size // unit) * unit
    return up(rows, ROWS) * up(lanes, LANES) / (rows * lanes)


def images_of(graph: JaxprGraph) -> dict[tuple[int, ...], Images]:
    """Shape -> what its axes are, as the first convolution of that shape has it."""
    # The gradient of a kernel is a convolution too, of images whose number is summed.
    found: dict[tuple[int, ...], Images | None] = {}
    for eqn in graph.eqns:
        if primitives.is_convolution(eqn):
            for shape, images in _roles(eqn):
                found.setdefault(shape, images)
    return {shape: images for shape, images in found.items() if images is not None}


def _roles(eqn) -> Iterator[tuple[tuple[int, ...], Images | None]]:
    """(shape, images) of what a convolution reads and writes; None for its kernel."""
    numbers = eqn.params["dimension_numbers"]
    (image, kernel), (out,) = eqn.invars, eqn.outvars
    for v, spec in ((image, numbers.lhs_spec), (out, numbers.out_spec)):
        count, features, *space = (v.aval.shape[axis] for axis in spec)
        yield v.aval.shape, Images(count, space[-1] if space else 1, features)
    yield kernel.aval.shape, None


def computes_inside(eqn, images: Mapping[tuple[int, ...], Images]) -> bool:
    """Whether an equation's kernel may compute what it reads, though it is no sum."""
    # A product computes what it reads in its own kernel; on a GPU it is a library's
    # call. So does a convolution of images that fill the rows of a tile; of fewer XLA
    # splits an axis of space, and what lies between is written.
    if not primitives.is_convolution(eqn):
        return primitives.is_dot(eqn)
    read = images.get(eqn.invars[0].aval.shape)
    return read is not None and read.fill_rows


def in_tiles(
    graph: Graph, variables: Sequence[Any], images: Mapping[tuple[int, ...], Images]
) -> Graph:
    """The graph with the bytes that images take; arguments stay as they are given."""
    values, given = list(graph.values), {*graph.arguments, *graph.aliases}
    for n, v in enumerate(variables):
        if n in given or v is None or v.aval.shape not in images:
            continue
        read = {graph.operations[i].name for i in graph.readers[n]}
        size, kind = values[n].bytes, images[v.aval.shape]
        # at default precision convolutions multiply bfloat16, to which XLA rounds their
        # input
        if v.aval.dtype == jnp.float32 and kind.fill_rows and read == {_CONVOLUTION}:
            size //= 2
        values[n] = replace(values[n], bytes=int(size * kind.padding))
    return replace(graph, values=tuple(values))
