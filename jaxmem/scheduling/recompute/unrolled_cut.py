"""What of unrolled layers the backward pass keeps, and what it recomputes together.

The pair of passes of a list of equations, as of two scans (`pairs.py`), its cut, and
its price: on a GPU what a product reads is written, so that even what costs nothing to
compute costs the time to write it a second time.
"""

import bisect
import math
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from scipy.cluster.hierarchy import DisjointSet

from jaxmem.chips import is_gpu, rates_of
from jaxmem.ir import primitives
from jaxmem.ir.graph import JaxprGraph, late_of
from jaxmem.ir.propagation import shardings_in
from jaxmem.ir.scans import is_var
from jaxmem.ir.shards import InputShardings, Shardings
from jaxmem.scheduling.recompute.between_passes import is_sum, kept_between
from jaxmem.scheduling.recompute.bottlenecks import bottlenecks
from jaxmem.scheduling.recompute.minimum_cut import ShardedPrice, price_at
from jaxmem.scheduling.recompute.pairs import Cut, Pair, cut

_SMALL = 1e-3  # of all that is kept: less is not worth a barrier, which ends fusions
# What keeping counts for where XLA need not write it: of two of one size, the other.
_FUSED = 1.01


def unrolled(closed, given: InputShardings | None = None) -> Pair | None:
    """The two passes of a list of equations; None where nothing is kept between."""
    # `given`: how the inputs of the list are sharded over devices.
    graph = JaxprGraph(closed)
    late = late_of(graph)
    early = kept_between(graph, late)
    size = shardings_in(closed, given).bytes_of
    least = _SMALL * sum(map(size, early))
    # a sum is kept or not with what it is of: XLA has one kernel for a whole softmax
    worth = lambda v: size(v) >= least or is_sum(graph, v)
    slots = dict(enumerate(v for v in early if worth(v) and not _is_stack(graph, v)))
    if not slots:
        return None
    free = _read_late(graph, late) - set(slots.values())
    free |= {*graph.invars, *graph.outputs}
    inside = partial(shardings_in, closed, given)
    return Pair(-1, -1, graph, slots, {}, free, (), (), 1, inside=inside)


def with_layer_inputs(pair: Pair, every: int = 1) -> Pair:
    """The same, where the inputs of layers are kept, or of those each `every`-th."""
    # a block of a transformer has two layers: attention, and what follows it
    graph, size = pair.body, pair.inside().bytes_of
    found = bottlenecks(graph, late_of(graph), size, _SMALL * pair.bytes)[::every]
    if not found:
        return pair
    rest = {slot: v for slot, v in pair.slots.items() if v not in found}
    inputs = pair.inputs | set(found)
    return replace(pair, slots=rest, inputs=inputs, layer_inputs=found)


def _read_late(graph: JaxprGraph, late: Set[int]) -> set[Any]:
    """What the forward pass makes and anything behind it reads."""
    reads = (v for i in late for v in graph.eqns[i].invars if is_var(v))
    return {v for v in reads if v in graph.maker and graph.maker[v] not in late}


def _is_stack(graph: JaxprGraph, v) -> bool:
    """Whether a loop made it: loops are not run a second time."""
    return primitives.is_loop(graph.eqns[graph.maker[v]])


def unrolled_cut(pair: Pair, rate: float, target: str, reductions: bool = False) -> Cut:
    """The cheapest cut of a list outside of loops; the rest as for `price_at`."""
    return cut(pair, unrolled_price(pair, rate, target, reductions))


def unrolled_price(
    pair: Pair, rate: float, target: str, reductions: bool = False
) -> ShardedPrice:
    """As `price_at`, of a list outside of loops."""
    again = _in_products(pair.body) if is_gpu(target) else frozenset()
    price = price_at(rate, target, reductions)
    return _Unrolled(price, pair.body, again, rate, rates_of(target).bandwidth)


@dataclass(frozen=True)
class _Unrolled(ShardedPrice):
    """A price outside of loops, where what is in `again` is written a second time."""

    in_scans: ShardedPrice
    graph: JaxprGraph
    again: Set[Any]
    rate: float
    bandwidth: float

    def __call__(self, eqn, shardings: Shardings) -> float | None:
        if primitives.is_loop(eqn):  # is not run a second time
            return None
        cost = self.in_scans(eqn, shardings)
        if cost is None or not any(v in self.again for v in eqn.outvars):
            return cost
        if math.isinf(self.rate):
            return None
        written = sum(map(shardings.bytes_of, eqn.outvars))
        return cost + self.rate * written / self.bandwidth

    def kept(self, v, shardings: Shardings) -> float:
        # a product is written anyway; what is made of it may never be, as within a
        # softmax
        extra = 1.0 if _is_written(self.graph, v) else _FUSED
        return super().kept(v, shardings) * extra


@lru_cache(maxsize=64)  # every candidate of a front asks for it
def _in_products(graph: JaxprGraph) -> frozenset[Any]:
    """What the forward pass makes and products of the backward one read.

    XLA:GPU writes it for them, where it does not keep it; for others it need not.
    """
    late = late_of(graph)
    found = set()
    for i in late:
        eqn = graph.eqns[i]
        if primitives.is_product(eqn):
            found.update(_source(graph, v) for v in eqn.invars if is_var(v))
    return frozenset(
        v for v in found if (i := graph.maker.get(v)) is not None and i not in late
    )


def _source(graph: JaxprGraph, v):
    """What a value is laid out anew from."""
    while (i := graph.maker.get(v)) is not None and primitives.of(graph.eqns[i]).moves:
        operand = graph.eqns[i].invars[0]
        if not is_var(operand):  # a number, broadcast
            break
        v = operand
    return v


def _is_written(graph: JaxprGraph, v) -> bool:
    i = graph.maker.get(v)
    return i is None or primitives.is_product(graph.eqns[i])


def made_together(pair: Pair, found: Cut) -> list[tuple[Any, ...]]:
    """What the backward pass reads and is not kept, by what is made in one go.

    All of a layer, where the inputs of layers are kept: as in `jax.checkpoint` one
    barrier stands before it. Else arrays between which nothing is kept.
    """
    graph = pair.body
    group_of = _layers(pair) if pair.layer_inputs else _connected(pair, found)
    groups: dict[int, list[Any]] = {}
    again = set(found.recomputed)
    for v in pair.slots.values():
        i = graph.maker[v]
        if v not in found.variables and i in again:
            groups.setdefault(group_of(i), []).append(v)
    return list(map(tuple, groups.values()))


def _layers(pair: Pair) -> Callable[[int], int]:
    """The number of the layer that an equation is in."""
    starts = sorted(pair.body.maker[v] for v in pair.layer_inputs)
    return partial(bisect.bisect_right, starts)


def _connected(pair: Pair, found: Cut) -> Callable[[int], int]:
    """An equation for all that are recomputed and read each other's results."""
    graph, size = pair.body, pair.inside().bytes_of
    least = _SMALL * pair.bytes
    apart = DisjointSet(found.recomputed)
    for i in found.recomputed:
        read = (v for v in graph.eqns[i].invars if is_var(v))
        for v in (v for v in read if size(v) >= least or is_sum(graph, v)):
            if graph.maker.get(v) in apart and v not in found.variables:
                apart.merge(i, graph.maker[v])
    return apart.__getitem__
