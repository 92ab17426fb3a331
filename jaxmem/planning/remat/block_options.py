"""What a block keeps for its backward pass: all, little, and the best between.

Source: several choices a block as in Zhao et al., "Rockmate" (ICML 2023), section 3.
"""

from collections import deque
from collections.abc import Set
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from jaxmem.planning.remat.sequence import SequenceTables

OPTIONS = 10  # of what to keep of a block


@dataclass(frozen=True)
class BlockOption:
    """Values that a block keeps, their bytes, and the cost of recomputing the rest."""

    values: frozenset[int]
    bytes: float
    cost: float


def options(
    tables: SequenceTables,
    cost: np.ndarray,  # of each operation
    start: int,  # the first operation of the block
    stop: int,  # the one after its last
    wanted: Set[int],  # values that the backward pass reads
    outgoing: Set[int],  # those that the next block reads, which are kept at any price
) -> list[BlockOption]:
    """What a block may keep, from all values to as few as possible."""
    weight = np.zeros(stop - start)
    for i in range(start, stop):
        mine = [v for v in tables.makes[i] if v in wanted and v not in outgoing]
        weight[i - start] = tables.size[mine].sum()
    read = np.array([not wanted.isdisjoint(m) for m in tables.makes[start:stop]])
    cost = np.where(tables.recomputable[start:stop], cost[start:stop], np.inf)
    option = partial(_option, tables, start, weight, cost, read, wanted)
    each = np.flatnonzero((weight > 0) & np.isfinite(cost) & (cost > 0))
    if not len(each):
        return [option(0.0)]
    least = 4 * (cost[each] / weight[each]).max()
    choices = [option(0.0), option(least)]
    pairs = deque([(choices[0], choices[1])])
    while pairs and len(choices) < OPTIONS:
        large, small = pairs.popleft()
        if large.bytes <= small.bytes or large.cost >= small.cost:
            continue
        # The price at which both are worth the same: the best option between them, if
        # there is one, is cheaper than both there.
        price = (small.cost - large.cost) / (large.bytes - small.bytes)
        between = option(price)
        if small.bytes < between.bytes < large.bytes:
            choices.append(between)
            pairs += [(large, between), (between, small)]
    return sorted(choices, key=lambda o: -o.bytes)


def _option(
    tables: SequenceTables,
    start: int,
    weight: np.ndarray,
    cost: np.ndarray,
    read: np.ndarray,
    wanted: Set[int],
    price: float,
) -> BlockOption:
    """The best option at this price of a byte, a minimum cut."""
    stop = start + len(cost)
    saved, recomputed = _cut(tables, start, stop, cost, weight * price, read)
    kept = frozenset(v for i in saved for v in tables.makes[i] if v in wanted)
    held = float(weight[[i - start for i in saved]].sum())
    return BlockOption(kept, held, float(sum(cost[i - start] for i in recomputed)))


def _cut(tables, start, stop, cost, weight, wanted) -> tuple[frozenset, frozenset]:
    """Operations whose values are kept, and those to recompute, at the least price."""
    # Every wanted value is kept, for its weight, or recomputed, for its cost, from
    # values that are kept or recomputed. An operation is two nodes of the network. It
    # is recomputed if 2 k is on the sink's side, kept if only 2 k + 1 is, and not
    # needed if neither is.
    count = stop - start
    total = float(cost[np.isfinite(cost)].sum()) + float(weight.sum())
    scale = 1e8 / total if total else 1.0  # scipy's capacities are 32-bit integers
    most = int(1e9)
    whole = lambda x: most if not np.isfinite(x) else int(round(x * scale))
    source, sink = 2 * count, 2 * count + 1
    edges: list[tuple[int, int, int]] = []
    for k in range(count):
        edges.append((source, 2 * k, whole(cost[k])))
        # An operation that the backward pass does not read is kept only at the highest
        # price, so that what is kept is what is wanted.
        unread = 0 if wanted[k] else most // 2
        edges.append((2 * k, 2 * k + 1, whole(weight[k]) + unread))
        if wanted[k]:
            edges.append((2 * k + 1, sink, most))
        for u in tables.reads[start + k]:
            j = int(tables.maker[u]) - start
            if 0 <= j:
                edges.append((2 * j + 1, 2 * k, most))
    rows, columns, capacity = zip(*edges, strict=True)
    shape = (2 * count + 2, 2 * count + 2)
    graph = csr_array((np.array(capacity, np.int32), (rows, columns)), shape=shape)
    rest = (graph - maximum_flow(graph, source, sink).flow).tocsr()
    rest.eliminate_zeros()
    near = set(breadth_first_order(rest, source, return_predecessors=False).tolist())
    saved = frozenset(
        start + k for k in range(count) if 2 * k in near and 2 * k + 1 not in near
    )
    recomputed = frozenset(start + k for k in range(count) if 2 * k not in near)
    return saved, recomputed
