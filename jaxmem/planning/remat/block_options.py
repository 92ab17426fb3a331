"""What a block keeps for its backward pass: all, little, the best between.

Which values to keep at a price of a byte, and so which to recompute, is a minimum cut.
The price at which two neighbours come to the same finds the best one between them, or
that there is none.

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
    """What a block keeps of its own, its bytes, the cost of recomputing the rest."""

    kept: frozenset[int]
    bytes: float
    cost: float


def options(
    tables: SequenceTables,
    cost: np.ndarray,
    start: int,
    stop: int,
    wanted: Set[int],
    outgoing: Set[int],
) -> list[BlockOption]:
    """What to keep of a block, from all to as little as it takes.

    Args:
      tables: the graph.
      cost: of each operation.
      start: the first operation of the block.
      stop: the one after its last.
      wanted: values that the backward pass reads.
      outgoing: those that are kept whatever it costs, since the next block reads them.
    """
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
    found = [option(0.0), option(least)]
    pairs = deque([(found[0], found[1])])
    while pairs and len(found) < OPTIONS:
        more, less = pairs.popleft()
        if more.bytes <= less.bytes or more.cost >= less.cost:
            continue
        price = (less.cost - more.cost) / (more.bytes - less.bytes)
        between = option(price)
        if less.bytes < between.bytes < more.bytes:
            found.append(between)
            pairs += [(more, between), (between, less)]
    return sorted(found, key=lambda o: -o.bytes)


def _option(
    tables: SequenceTables,
    start: int,
    weight,
    cost,
    read,
    wanted: Set[int],
    price: float,
) -> BlockOption:
    """What is kept at this price of a byte."""
    stop = start + len(cost)
    saved, recomputable = _cut(tables, start, stop, cost, weight * price, read)
    kept = frozenset(v for i in saved for v in tables.makes[i] if v in wanted)
    held = float(weight[[i - start for i in saved]].sum())
    return BlockOption(kept, held, float(sum(cost[i - start] for i in recomputable)))


def _cut(tables, start, stop, cost, weight, wanted) -> tuple[frozenset, frozenset]:
    """Operations whose values are kept, and those repeated, at the least price.

    Every wanted value is kept, for its weight, or recomputed, for its cost, from values
    that are kept or recomputed.
    """
    count = stop - start
    total = float(cost[np.isfinite(cost)].sum()) + float(weight.sum())
    scale = 1e8 / total if total else 1.0
    most = int(1e9)
    whole = lambda x: most if not np.isfinite(x) else int(round(x * scale))
    rows, columns, capacity = [], [], []
    source, sink = 2 * count, 2 * count + 1

    def edge(a, b, c):
        rows.append(a)
        columns.append(b)
        capacity.append(c)

    for k in range(count):
        edge(source, 2 * k, whole(cost[k]))
        # One more for a weight of nothing, so that what is kept is what is wanted.
        edge(2 * k, 2 * k + 1, whole(weight[k]) + (0 if wanted[k] else most // 2))
        if wanted[k]:
            edge(2 * k + 1, sink, most)
        for u in tables.reads[start + k]:
            j = int(tables.maker[u]) - start
            if 0 <= j:
                edge(2 * j + 1, 2 * k, most)
    shape = (2 * count + 2, 2 * count + 2)
    graph = csr_array((np.array(capacity, np.int32), (rows, columns)), shape=shape)
    rest = (graph - maximum_flow(graph, source, sink).flow).tocsr()
    rest.eliminate_zeros()
    there = set(breadth_first_order(rest, source, return_predecessors=False).tolist())
    saved = frozenset(
        start + k for k in range(count) if 2 * k in there and 2 * k + 1 not in there
    )
    recomputable = frozenset(start + k for k in range(count) if 2 * k not in there)
    return saved, recomputable
