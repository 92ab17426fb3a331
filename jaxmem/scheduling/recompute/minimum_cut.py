"""The fewest bytes from which a set of values can be recomputed: a minimum cut.

A variable is an edge with its bytes as capacity, from the equation that makes it to
those that read it; an equation that may be recomputed is an edge from the source with
its cost as capacity, in bytes that one would pay to avoid it. (The partitioners of
AOTAutograd and of nvFuser cut forward from backward in the same way.)
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from jaxmem.chips import rates_of
from jaxmem.cost.equations import packing_seconds, recompute_seconds
from jaxmem.ir import primitives
from jaxmem.ir.communication import sent
from jaxmem.ir.fused import fused_only
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.part_marks import scopes_of
from jaxmem.ir.scans import is_var
from jaxmem.ir.shards import Shardings

# of an equation, in bytes of one device; None: never recomputed
Price = Callable[[Any], float | None]


class ShardedPrice(Protocol):
    """The same of an equation whose arrays are sharded over devices."""

    def __call__(self, eqn: Any, shardings: Shardings) -> float | None: ...

    def kept(self, v: Any, shardings: Shardings) -> float:
        """What it counts for to keep a variable, in bytes of one device."""
        return shardings.kept_bytes_of(v)


class FusedAlone(ShardedPrice):
    """A price at which only what costs very little is recomputed."""

    def __call__(self, eqn, shardings: Shardings) -> float | None:
        return fused_only(eqn, sent(eqn, shardings))


@dataclass(frozen=True)
class PricedBy(ShardedPrice):
    """A price that a function of an equation tells."""

    cost: Callable[[Any], float | None]

    def __call__(self, eqn, shardings: Shardings) -> float | None:
        return self.cost(eqn)


def price_at(
    rate: float | None,
    target: str,
    reductions: bool = False,
    once: tuple[str, ...] = (),
) -> ShardedPrice:
    """What one would pay, in bytes, for not recomputing an equation."""
    # `rate`: bytes that one would rather keep than compute for a second on `target`; at
    # infinity, and with None, only what costs nothing is recomputed. `reductions` and
    # `once`: as `residuals.Recompute` has them.
    if rate is None or (math.isinf(rate) and not reductions):
        return FusedAlone()
    return _AtRate(rate, target, reductions, once)


@dataclass(frozen=True)
class _AtRate(ShardedPrice):
    """A price at a rate; the attributes are those of `price_at`."""

    rate: float
    target: str
    reductions: bool = False
    once: tuple[str, ...] = ()

    def __call__(self, eqn, shardings: Shardings) -> float | None:
        if self.once and label_of(eqn) in self.once:
            return None
        sums = self.reductions and primitives.is_reduction(eqn)
        if sums and not sent(eqn, shardings):
            return 0.0
        if math.isinf(self.rate):
            return FusedAlone()(eqn, shardings)
        cost = recompute_seconds(eqn, rates_of(self.target), shardings)
        return None if cost is None else cost * self.rate

    def kept(self, v, shardings: Shardings) -> float:
        """Its bytes, and the seconds to pack it into bits."""
        own = super().kept(v, shardings)
        if math.isinf(self.rate):
            return own
        return own + self.rate * packing_seconds(v, rates_of(self.target), shardings)


def label_of(eqn) -> str:
    """What tells operations of a layer apart: module, operation, type of its result."""
    return f"{scopes_of(eqn)} {eqn.primitive.name} {eqn.outvars[0].aval.str_short()}"


_MOST = 2**28  # of all capacities together: scipy's flows are int32
_ENDLESS = 2**30
_SOURCE, _SINK = 0, 1

# Later equations are dearer by as much, so that no two cuts are worth the same: each
# than the one before it, and all of them together at most.
_TILT, _TILTED = 1e-5, 1e-1


def price_of(graph: JaxprGraph, i: int, price: Price) -> float | None:
    """The price of equation `i`, with a little added for a late position."""
    cost = price(graph.eqns[i])
    return cost and cost * (1 + min(_TILT * _costly_before(graph)[i], _TILTED))


@functools.lru_cache(maxsize=64)
def _costly_before(graph: JaxprGraph) -> list[int]:
    """How many equations before each one cost something."""
    # Only these: a body that was rewritten has other moves and casts, and must be
    # worth the same cut at the same price, or more of it would be recomputed.
    costs = (fused_only(eqn) is None for eqn in graph.eqns)
    return list(itertools.accumulate(costs, initial=0))


def least(
    graph: JaxprGraph,
    wanted: Iterable[Any],
    free: set[Any],
    price: Price,
    size: Callable[[Any], float],
):
    """Variables to keep so that all of `wanted` can be made of them and of `free`."""
    # `price(eqn)` is what recomputing an equation may cost at most, in bytes that would
    # otherwise be kept; None where it may not be recomputed. `size(variable)` is what
    # keeping it counts for. Both are of one device.
    wanted = [v for v in dict.fromkeys(wanted) if v not in free]
    prices, makers = _reachable(graph, wanted, free, price)
    first = {v: 2 + 2 * i for i, v in enumerate(makers)}
    nodes = {i: 2 + 2 * len(first) + k for k, i in enumerate(prices)}
    total = sum(map(size, first)) + sum(prices.values())
    unit = max(1.0, total / _MOST)
    edges: dict[tuple[int, int], int] = {}
    for v, i in makers.items():
        edges[first[v], first[v] + 1] = 1 + int(size(v) / unit)
        edges[_SOURCE if i is None else nodes[i], first[v]] = _ENDLESS
    for i, cost in prices.items():
        edges[_SOURCE, nodes[i]] = int(cost / unit)
        for w in filter(is_var, graph.eqns[i].invars):
            if w in first:
                edges[first[w] + 1, nodes[i]] = _ENDLESS
    for v in wanted:
        edges[first[v] + 1, _SINK] = _ENDLESS
    near = _reaching_sink(edges, 2 + 2 * len(first) + len(nodes))
    return [v for v, i in first.items() if i not in near and i + 1 in near]


def _reachable(graph: JaxprGraph, wanted: Sequence[Any], free: set[Any], price: Price):
    """Prices by equation, and variable -> equation that makes it, as far as needed."""
    # None for the equation of a variable that cannot be recomputed.
    todo, prices, makers = list(wanted), {}, {}
    while todo:
        v = todo.pop()
        if v in makers or v in free:
            continue
        makers[v] = None
        if v not in graph.maker:
            continue
        i = graph.maker[v]
        cost = price_of(graph, i, price)
        if cost is None:
            continue
        makers[v] = i
        if i not in prices:
            prices[i] = cost
            todo += filter(is_var, graph.eqns[i].invars)
    return prices, makers


# Of several cuts of the same capacity the one nearest to the wanted values is taken, so
# that the lowest peak is computed twice.
def _reaching_sink(edges: dict[tuple[int, int], int], size: int) -> set[int]:
    """The nodes from which more could still flow to the sink, at the largest flow."""
    if not edges:
        return {_SINK}
    rows, columns = zip(*edges, strict=True)
    capacity = np.array(list(edges.values()), np.int32)
    network = csr_array((capacity, (rows, columns)), shape=(size, size))
    left = network - maximum_flow(network, _SOURCE, _SINK).flow
    left.data = (left.data > 0).astype(np.int32)
    left.eliminate_zeros()
    found = breadth_first_order(left.T.tocsr(), _SINK, return_predecessors=False)
    return set(found.tolist())


def needed(graph: JaxprGraph, wanted: Iterable[Any], known: set[Any]) -> list[int]:
    """Positions of the equations that make `wanted` of `known`, in order."""
    todo, found = list(wanted), set()
    while todo:
        v = todo.pop()
        if v not in known and graph.maker[v] not in found:
            found.add(graph.maker[v])
            todo += filter(is_var, graph.eqns[graph.maker[v]].invars)
    return sorted(found)
