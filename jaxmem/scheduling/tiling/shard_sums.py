"""Sums over an axis that is sharded over devices, in the loop of a region.

What each device adds up of its own parts stays apart until the loop is done: else XLA
would sum over the devices in each iteration, and send n times as much.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxmem.ir import primitives
from jaxmem.ir.placements.labels import Labels
from jaxmem.ir.shards import Names, Shardings
from jaxmem.scheduling.tiling.regions import Region, RegionGraph

_REDUCE = {
    known.combine: known.name
    for known in primitives.KNOWN
    if known.kind is primitives.Kind.REDUCTION and known.combine
}


@dataclass(frozen=True)
class Apart:
    """An axis that is summed over, and sharded.

    Attributes:
      mesh: what it is sharded over.
      names: over which axes of the mesh.
      ins: of each operand, which of its axes it is; None where it has none.
    """

    mesh: Any
    names: Names
    ins: tuple[int | None, ...]

    @property
    def shards(self) -> int:
        return math.prod(self.mesh.shape[name] for name in self.names)

    def each(self, add: Callable, mapped: bool) -> Callable:
        """`add(total, *operands)` for each shard, with a total for each.

        Args:
          add: for one of them.
          mapped: whether by a `shard_map`, for what XLA does not partition; it hides
            from later passes what is done.
        """

        def run(total, *args):
            split = [self._split(x, a) for x, a in zip(args, self.ins, strict=True)]
            return jax.vmap(add, in_axes=(0, *self.ins))(total, *split)

        return self._mapped(add) if mapped else run

    def _mapped(self, add: Callable) -> Callable:
        at = lambda axis: PartitionSpec(*[None] * axis, self.names)
        specs = [PartitionSpec() if a is None else at(a) for a in self.ins]
        return jax.shard_map(
            lambda total, *args: add(total[0], *args)[None],
            mesh=self.mesh,
            in_specs=(at(0), *specs),
            out_specs=at(0),
            axis_names=set(self.names),
        )

    def _split(self, x, axis: int | None):
        if axis is None:
            return x
        sizes = self.shards, x.shape[axis] // self.shards
        return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])


def sums_apart(graph: RegionGraph, region: Region, i: int) -> Iterator[Apart]:
    """The sharded axes over which an equation of a region sums."""
    eqn, table = graph.eqns[i], graph.labels(i, region.blocks)
    assert isinstance(table, Labels)  # it is in the region
    kept = {None, *itertools.chain(*table.outs)}
    for label in dict.fromkeys(itertools.chain(*table.ins)):
        if label in kept:
            continue
        ins = table.axes(label)[: len(eqn.invars)]
        names = _names(graph.shardings, eqn, ins)
        shards = graph.shardings.size(names)
        is_cut = any(
            a is not None and a == b
            for a, b in zip(ins, region.placed[i].in_axes, strict=True)
        )
        if shards > 1 and (not is_cut or shards == region.shards):
            yield Apart(graph.shardings.mesh, names, ins)


def _names(shardings: Shardings, eqn, ins: Sequence[int | None]) -> Names:
    """Over what an axis is sharded, if all operands that have it are sharded alike."""
    pairs = zip(eqn.invars, ins, strict=True)
    found = {shardings.names(v, axis) for v, axis in pairs if axis is not None}
    return found.pop() if len(found) == 1 else ()


def combined(combine: str, total, axes: int = 1):
    """What has been added up for each shard, along so many axes, combined."""
    return getattr(lax, _REDUCE[combine])(total, tuple(range(axes)))


def stretched(x, apart: Sequence[Apart]):
    """One such array for each shard."""
    return jnp.broadcast_to(x, (*(one.shards for one in apart), *x.shape))
