"""The loop that runs a region part by part.

Inputs that are cut are read in place, slice by slice; what others need of the region is
written in place; sums are carried, in float32 where the array is narrower.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax import lax

from jaxmem import _compat
from jaxmem.cost.parts import wide
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import Values
from jaxmem.ir.placements.lower import PartValues
from jaxmem.ir.scans import is_var
from jaxmem.scheduling.tiling.gathered import gathered
from jaxmem.scheduling.tiling.parts_loop import PartsLoop, around
from jaxmem.scheduling.tiling.regions import (
    Region,
    RegionGraph,
    bits_of,
    inner,
)
from jaxmem.scheduling.tiling.shard_parts import Parts
from jaxmem.scheduling.tiling.shard_sums import (
    Apart,
    combined,
    stretched,
    sums_apart,
)
from jaxmem.scheduling.tiling.sums import moves_behind, neutral, term

SCOPE = "jaxmem.tile"  # of the loop of a region
VOCABULARY = f"{SCOPE}_vocabulary"  # of a head's loops, which are made before


def tiled(graph: RegionGraph, region: Region):
    """The closed jaxpr of a graph with a region as one loop."""
    loop = _RegionLoop(graph, region)
    return _compat.without_dead_code(jaxprs.retrace(graph.closed, loop.run))


@dataclass
class _Sum:
    """A running sum: an equation, what follows it in a part, the variable it gives."""

    eqn: Any
    tail: tuple[Any, ...]
    out: Any
    combine: str
    start: Any = None  # the variable onto which it is summed
    apart: tuple[Apart, ...] = ()  # the axes of the mesh over which it goes

    @property
    def dtype(self):
        return wide(self.out.aval.dtype)

    def first(self, read):
        """What the sum is before any part has been added."""
        if self.apart:
            return stretched(neutral(self.combine, self.out.aval), self.apart)
        given = self._given(read)
        return neutral(self.combine, self.out.aval) if given is None else given

    def _given(self, read):
        """What is summed onto; None if nothing is."""
        if primitives.is_scatter_add(self.eqn):  # onto what was there
            return read(self.eqn.invars[0]).astype(self.dtype)
        return None if self.start is None else read(self.start)

    def whole(self, total, read):
        """The array that is summed, after the last part."""
        if self.apart:
            # in the type in which the equation's own sum would be sent
            total = total.astype(self.eqn.outvars[0].aval.dtype)
            total = combined(self.combine, total, len(self.apart)).astype(self.dtype)
            given = self._given(read)
            total = total if given is None else given + total
        return total.astype(self.out.aval.dtype)

    def added(self, args: Sequence[Any], total):
        """The sum with one part added."""
        add = lambda total, *args: self._added(args, total)
        # of a convolution in groups XLA gathers the operands
        mapped = primitives.is_convolution(self.eqn)
        for one in reversed(self.apart):
            add = one.each(add, mapped)
        if mapped:  # no pass looks for regions in it
            add = jax.named_scope(SCOPE)(add)
        return add(total, *args)

    def _added(self, args: Sequence[Any], total):
        if primitives.is_scatter_add(self.eqn):
            return _scattered(self.eqn, args, total)
        part = term(self.eqn, args, self.tail, self.dtype)
        return getattr(lax, self.combine)(total, part.astype(total.dtype))


def _scattered(eqn, args: Sequence[Any], total):
    p = eqn.params
    return lax.scatter_add(
        total,
        args[1],
        args[2].astype(total.dtype),
        p["dimension_numbers"],
        indices_are_sorted=p["indices_are_sorted"],
        unique_indices=p["unique_indices"],
        mode=p["mode"],
    )


@dataclass
class _RegionLoop:
    """How a region becomes a loop."""

    graph: RegionGraph
    region: Region

    @cached_property
    def parts(self) -> Parts:
        return Parts(self.region.n, self.region.shards)

    @cached_property
    def order(self) -> list[int]:
        return sorted(self.region.eqns)

    @cached_property
    def sums(self) -> dict[int, _Sum]:
        return {i: self._sum(i) for i in self.order if self.region.is_sum(i)}

    @cached_property
    def done_inside(self) -> set[int]:
        """Equations outside of the region that are done to every part of a sum."""
        tails = (eqn for one in self.sums.values() for eqn in one.tail)
        return {self.graph.maker[eqn.outvars[0]] for eqn in tails}

    @cached_property
    def kept(self) -> list[Any]:
        """Variables that are cut and needed outside: written part by part."""
        within = inner(self.graph, self.region)
        made = (i for i in self.order if i not in self.sums)
        cut = (v for i in made for v in self.graph.eqns[i].outvars)
        return [v for v in cut if v not in within and self._is_needed(v)]

    def _is_needed(self, v) -> bool:
        return v in self.graph.outputs or bool(self.graph.users.get(v))

    @cached_property
    def after(self) -> set[int]:
        """Equations outside that need the loop to be done."""
        inside = bits_of(self.region.eqns)
        above, eqns = self.graph.above, range(len(self.graph.eqns))
        return {i for i in eqns if i not in self.region.eqns and above[i] & inside}

    def _sum(self, i: int) -> _Sum:
        graph, eqn = self.graph, self.graph.eqns[i]
        combine = self.region.placed[i].op
        tail, v, start = [], eqn.outvars[0], None
        if primitives.is_product(eqn) or primitives.is_reduce_sum(eqn):
            moves, v = moves_behind(graph, v)
            tail = [graph.eqns[k] for k in moves]
            start, v = self._start(v)
            tail += [graph.eqns[graph.maker[v]]] if start is not None else []
        apart = tuple(sums_apart(graph, self.region, i))
        return _Sum(eqn, tuple(tail), v, combine, start, apart)

    def _start(self, v) -> tuple[Any, Any]:
        """What a sum alone is added to, and what that gives; else None, and the sum."""
        users = self.graph.users.get(v, ())
        if v in self.graph.outputs or len(users) != 1:
            return None, v
        follower = self.graph.eqns[users[0]]
        start = self._before(follower, v)
        return start, v if start is None else follower.outvars[0]

    def _before(self, follower, v) -> Any:
        """What a sum is added to, where that is there before the loop."""
        if not primitives.is_sum(follower):
            return None
        (other,) = [w for w in follower.invars if w is not v] or [None]
        if other is None or not is_var(other) or other.aval.dtype != wide(v.aval.dtype):
            return None
        if other.aval.shape != v.aval.shape:  # one of them is broadcast
            return None
        m = self.graph.maker.get(other)
        return other if m is None or m not in self.region.eqns | self.after else None

    def run(self, args: list) -> list[Any]:
        """The outputs of the graph."""
        inside = self.region.eqns | self.done_inside
        return around(self.graph, args, inside, self.after, self._looped)

    def _looped(self, values: Values) -> dict[Any, Any]:
        moved = gathered(self.graph, self.region, values.read)
        read = lambda v: moved[v] if is_var(v) and v in moved else values.read(v)
        axis = self.region.axes
        axes = {v: axis[v] for v in self.kept}

        def part_of(totals, j):
            cut = lambda v, axis, whole: self.parts.take(whole(v), axis, j)
            start = lambda length: self.parts.start(length, j)
            part = PartValues(read, cut, self.parts.size, start)
            sums = dict(zip(self.sums, totals, strict=True))
            for i in self.order:
                eqn, placed = self.graph.eqns[i], self.region.placed[i]
                if i in sums:
                    sums[i] = self.sums[i].added(part.operands(eqn, placed), sums[i])
                else:
                    part.run(eqn, placed)
            made = {v: part.env[v, self.region.of[v]] for v in axes}
            return list(sums.values()), made

        first = [one.first(read) for one in self.sums.values()]
        totals, found = PartsLoop(axes, self.parts).run(SCOPE, first, part_of)
        for one, total in zip(self.sums.values(), totals, strict=True):
            found[one.out] = one.whole(total, read)
        return found
