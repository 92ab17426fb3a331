"""Plans for a training step, seen as a chain of blocks: forward, then backward.

The forward pass is cut where few bytes cross, into few large blocks or many small ones.
A block is done again from what crosses its beginning, or from that and some of its own
values: which ones for which price of a byte is a minimum cut. Which blocks keep what,
which beginnings are kept meanwhile and from which a run of blocks starts anew, nested
as deep as it takes, is dynamic programming over runs of blocks and memory in equal
slots; one table has the plan for every budget.

The table counts in slots and takes a block's values to be there at once, so a plan's
bytes are only near its budget: every plan is evaluated, and mended, by the search.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for
heterogeneous chains" (https://arxiv.org/abs/1911.13214), section 4, with several
choices a block as in Zhao et al., "Rockmate" (ICML 2023), section 3.
"""

import copy
from collections import deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from jaxmem.planning._remat_sequence import Events, Tables, staged

SLOTS = 500
SCALES = (1, 4, 16, 64)  # the plain peak, and parts of it, over which the slots lie
BLOCKS = 80
PARTS = (BLOCKS, 30, 20, 14, 8, 5)  # of the bytes: what a block holds at most
SMALL = 0.01  # of a block's largest value
PLANS = 16  # at least, of each scale
LONGEST = 2.5  # times the operations: nothing longer is looked for
OPTIONS = 10  # of what to keep of a block


def chain_plans(
    tables: Tables, cost: np.ndarray, plain: Events
) -> Iterator[np.ndarray]:
    """Sequences, from those that take much memory to those that take little.

    Args:
      tables: the graph.
      cost: of each operation.
      plain: every operation once.
    """
    chain, known = _Chain(tables, cost, plain), set()
    for parts in PARTS:
        cuts = tuple(chain.cuts(parts))
        if cuts in known or not 3 <= len(cuts) <= BLOCKS:
            continue
        known.add(cuts)
        yield from _plans(chain.cut(cuts), plain)


def _plans(chain: "_Chain", plain: Events) -> Iterator[np.ndarray]:
    """Of one way of cutting, from much memory to little."""
    before, many = None, min(SLOTS, max(PLANS, 20_000 // chain.count))
    for scale in SCALES:
        table = _Table(chain, plain.peak / scale / SLOTS)
        if table.plan(SLOTS) is None:
            return
        for slots in np.geomspace(SLOTS, SLOTS / 10, many).astype(int).tolist():
            plan = table.plan(slots)
            if plan is not None and plan != before:
                before = plan
                sequence = chain.sequence(plan)
                yield sequence
                if len(sequence) > max(LONGEST * chain.count, 1500):
                    return


@dataclass(frozen=True)
class _Option:
    """What a block keeps of its own, its bytes, the cost of making the rest again."""

    kept: frozenset[int]
    bytes: float
    cost: float


@dataclass(frozen=True)
class _Block:
    """A run of forward operations.

    Attributes:
      start, stop: the operations.
      back: the first operation of the backward pass that reads of its own.
      early: small values of its own that are read before.
      crosses: what is made before it and read by it or later in the forward pass.
      own: its values.
      forward: bytes that are alive while it runs, beside what crosses its beginning.
      backward: bytes while the backward pass reads it, with its own values all there.
      cost: of doing it.
      options: from all kept to little.
    """

    start: int
    stop: int
    back: int
    early: frozenset[int]
    crosses: frozenset[int]
    own: frozenset[int]
    forward: float
    backward: float
    cost: float
    options: tuple[_Option, ...]


class _Chain:
    def __init__(self, tables: Tables, cost: np.ndarray, plain: Events):
        self.tables, self._cost, self._profile = tables, cost, plain.profile
        self.count = len(tables.makes)
        self._lifetimes()
        self.turn = self._turn()
        self._after_turn()
        self.blocks: list[_Block] = []  # see `cut`

    def _lifetimes(self) -> None:
        """The values, and where each is read last (where it is made, if nowhere)."""
        tables = self.tables
        self._values = [v for i in range(self.count) for v in tables.makes[i]]
        self._last = {
            v: max(tables.graph.readers[v], default=int(tables.maker[v]))
            for v in self._values
        }

    def _turn(self) -> int:
        """Where the forward pass ends: where most bytes wait that may be made again."""
        waiting = np.zeros(self.count + 2)
        for v in self._values:
            made = int(self.tables.maker[v])
            if v in self.tables.held_set or not self.tables.again[made]:
                continue
            waiting[made + 1] += self.tables.size[v]
            waiting[self._last[v] + 1] -= self.tables.size[v]
        return int(np.argmax(np.cumsum(waiting)[: self.count]))

    def _after_turn(self) -> None:
        """Of the forward pass: first reader in the backward pass, last before it."""
        readers = self.tables.graph.readers
        self.wanted: dict[int, int] = {}
        self._last_forward: dict[int, int] = {}
        for v in self._values:
            made = int(self.tables.maker[v])
            if made >= self.turn:
                continue
            later = [r for r in readers[v] if r >= self.turn]
            if later:
                self.wanted[v] = later[0]
            earlier = [r for r in readers[v] if r < self.turn]
            self._last_forward[v] = earlier[-1] if earlier else made

    def cuts(self, parts: int) -> list[int]:
        """Where blocks begin that hold about as much as so many parts; all, of few."""
        if self.turn <= parts:
            return list(range(self.turn))
        made = np.zeros(self.turn + 1)
        for v in self.wanted:
            made[int(self.tables.maker[v]) + 1] += self.tables.size[v]
        most = made.sum() / parts
        # What is large alone is not worth a block of its own.
        held = np.cumsum(np.minimum(made, most / 2))
        return _cuts(self._crossing[0], held, most)

    @cached_property
    def _crossing(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes before each place that the forward pass reads later; that only wait."""
        tables, size = self.tables, self.tables.size
        crossing, waiting = np.zeros((2, self.turn + 2))
        for v, last in self._last_forward.items():
            crossing[int(tables.maker[v]) + 1] += size[v]
            crossing[last + 1] -= size[v]
            if v in self.wanted or v in tables.held_set:
                waiting[last + 1] += size[v]
        return np.cumsum(crossing)[:-1], np.cumsum(waiting)[:-1]

    def cut(self, cuts: Sequence[int]) -> "_Chain":
        """The chain with blocks that begin at these operations."""
        tables, size, profile = self.tables, self.tables.size, self._profile
        crossing, waiting = self._crossing
        resting = profile.copy()  # of the backward pass alone
        for v in self.wanted:
            resting[self.turn : self._last[v] + 1] -= size[v]
        blocks: list[_Block] = []
        limit = self.count
        for start, stop in zip(cuts, [*cuts[1:], self.turn], strict=True):
            own = frozenset(v for i in range(start, stop) for v in tables.makes[i])
            outgoing = {v for v in own if self._last_forward[v] >= stop}
            wanted = {v for v in own if v in self.wanted}
            # What goes out may first be read by the next block's backward pass.
            back, early = self._back(wanted - outgoing or wanted, limit)
            crosses = frozenset(
                v
                for v, last in self._last_forward.items()
                if tables.maker[v] < start <= last
            )
            there = size[list(wanted - outgoing)].sum()
            there += self._read_too(back, limit, start, wanted - outgoing)
            forward = float(profile[start:stop].max())
            forward -= waiting[start] + crossing[start]
            resting_most = max(float(resting[back:limit].max(initial=0.0)), 0.0)
            blocks.append(
                _Block(
                    start,
                    stop,
                    back,
                    early,
                    crosses,
                    own,
                    forward,
                    resting_most + float(there),
                    float(self._cost[start:stop].sum()),
                    tuple(self._options(start, stop, outgoing)),
                )
            )
            limit = back
        chain = copy.copy(self)
        chain.blocks = blocks
        return chain

    def _back(self, wanted: Set[int], limit: int) -> tuple[int, frozenset[int]]:
        """Where the backward pass begins to read these values, and which before that.

        Small ones do not count: a mask or a number that is read long before the rest.
        """
        size = self.tables.size
        small = SMALL * max((size[v] for v in wanted), default=0.0)
        back = min([limit, *(self.wanted[v] for v in wanted if size[v] >= small)])
        return back, frozenset(v for v in wanted if self.wanted[v] < back)

    def _read_too(self, back: int, limit: int, start: int, inner: Set[int]) -> float:
        """Bytes that the backward pass reads of this block's end and of the next."""
        tables, most = self.tables, 0.0
        for i in range(back, limit):
            read = [
                v
                for v in tables.reads[i]
                if start <= tables.maker[v] < self.turn and v not in inner
            ]
            most = max(most, float(tables.size[read].sum()))
        return most

    def _options(self, start: int, stop: int, outgoing: set[int]) -> list[_Option]:
        """What to keep of a block: all, as little as it takes, the best between them.

        The price of a byte at which two neighbours come to the same finds the best
        one between them, or that there is none.
        """
        weight, cost, wanted = self._weighed(start, stop, outgoing)
        option = partial(self._option, start, weight, cost, wanted)
        each = np.flatnonzero((weight > 0) & np.isfinite(cost) & (cost > 0))
        if not len(each):
            return [option(0.0)]
        least = 4 * (cost[each] / weight[each]).max()
        options = [option(0.0), option(least)]
        pairs = deque([(options[0], options[1])])
        while pairs and len(options) < OPTIONS:
            more, less = pairs.popleft()
            if more.bytes <= less.bytes or more.cost >= less.cost:
                continue
            price = (less.cost - more.cost) / (more.bytes - less.bytes)
            found = option(price)
            if less.bytes < found.bytes < more.bytes:
                options.append(found)
                pairs += [(more, found), (found, less)]
        return sorted(options, key=lambda o: -o.bytes)

    def _weighed(self, start: int, stop: int, outgoing: set[int]):
        """Of a block's operations: bytes to keep, costs, which are wanted."""
        tables = self.tables
        wanted = np.array(
            [any(v in self.wanted for v in tables.makes[i]) for i in range(start, stop)]
        )
        weight = np.zeros(stop - start)
        for i in range(start, stop):
            for v in tables.makes[i]:
                if v in self.wanted and v not in outgoing:
                    weight[i - start] += tables.size[v]
        cost = np.where(tables.again[start:stop], self._cost[start:stop], np.inf)
        return weight, cost, wanted

    def _option(self, start: int, weight, cost, wanted, price: float) -> _Option:
        """What is kept at this price of a byte."""
        tables, stop = self.tables, start + len(cost)
        saved, again = _cut(tables, start, stop, cost, weight * price, wanted)
        kept = frozenset(v for i in saved for v in tables.makes[i] if v in self.wanted)
        held = float(weight[[i - start for i in saved]].sum())
        return _Option(kept, held, float(self._cost[list(again)].sum()))

    def sequence(self, plan: list[frozenset[int]]) -> np.ndarray:
        """The sequence that keeps these values while block after block goes back.

        Args:
          plan: what is kept of the forward pass when the backward pass comes to the
            last block, the one before, and so on.
        """
        tables = self.tables
        ends = [self.count] + [b.back for b in self.blocks]
        stay = tables.held_set.union(*(b.early for b in self.blocks))
        stages = [list(range(self.blocks[-1].back))]
        kept = [frozenset(self._values)]
        for at, held in zip(reversed(range(len(self.blocks))), plan, strict=True):
            stages.append(list(range(ends[at + 1], ends[at])))
            # What later blocks made is read for the last time hereabouts.
            forgotten = {
                v
                for v in self._last_forward
                if tables.maker[v] < self.blocks[at].stop and v not in stay
            }
            kept.append(kept[0] - forgotten | held)
        return staged(self.tables, stages, kept)


def _cuts(crossing: np.ndarray, held: np.ndarray, most: float) -> list[int]:
    """The cuts that the fewest bytes cross in all; no block between them holds more.

    Args:
      crossing: bytes that cross each place, from before the first operation.
      held: bytes that the backward pass reads, made before each place.
      most: bytes that a block of several operations may hold.
    """
    count = len(crossing)
    first = np.searchsorted(held, held - most)
    total, before = np.zeros(count), np.zeros(count, np.int64)
    for at in range(1, count):
        start = min(int(first[at]), at - 1)
        before[at] = start + int(np.argmin(total[start:at]))
        total[at] = total[before[at]] + crossing[at]
    cuts = [int(before[count - 1])]
    while cuts[-1]:
        cuts.append(int(before[cuts[-1]]))
    return cuts[::-1]


def _cut(tables, start, stop, cost, weight, wanted) -> tuple[frozenset, frozenset]:
    """Operations whose values are kept, and those done again, at the least price.

    Every wanted value is kept, for its weight, or made again, for its cost, from values
    that are kept or made again.
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
    again = frozenset(start + k for k in range(count) if 2 * k not in there)
    return saved, again


class _Table:
    """The least cost of every run of blocks for every number of slots."""

    def __init__(self, chain: _Chain, unit: float):
        self._chain, self._unit, blocks = chain, unit, chain.blocks
        count = len(blocks)
        self._extra = np.array(
            [[self._slots(b.crosses - a.crosses) for b in blocks] for a in blocks]
        )
        cost = np.cumsum([0.0] + [b.cost for b in blocks])
        self._cost: dict[tuple[int, int], np.ndarray] = {}
        self._choice: dict[tuple[int, int], np.ndarray] = {}
        for length in range(1, count + 1):
            for i in range(count - length + 1):
                self._fill(i, i + length, cost)

    def _slots(self, values) -> int:
        size = self._chain.tables.size
        return round(float(size[list(values)].sum()) / self._unit)

    def _round(self, size: float) -> int:
        return round(size / self._unit)

    def _fill(self, i: int, j: int, cost: np.ndarray) -> None:
        """Choices: -1 - k is option k of the first block, s a restart from block s."""
        block = self._chain.blocks[i]
        best = np.full(SLOTS + 1, np.inf)
        choice = np.zeros(SLOTS + 1, np.int16)
        need = max(self._round(block.forward), self._round(block.backward))
        if j == i + 1:
            best[min(need, SLOTS + 1) :] = block.cost
            choice[:] = -1
            self._cost[i, j], self._choice[i, j] = best, choice
            return
        for k, option in enumerate(block.options):
            held = self._round(option.bytes) + int(self._extra[i, i + 1])
            rest = self._cost[i + 1, j]
            value = np.full(SLOTS + 1, np.inf)
            if held <= SLOTS:
                value[held:] = rest[: SLOTS + 1 - held] + block.cost + option.cost
            value[:need] = np.inf
            better = value < best
            best[better], choice[better] = value[better], -1 - k
        forward = 0
        for s in range(i + 1, j):
            forward = max(forward, self._round(self._chain.blocks[s - 1].forward))
            held = int(self._extra[i, s])
            low = max(held, forward)
            if low > SLOTS:
                break
            value = self._cost[i, s][low:] + (cost[s] - cost[i])
            value = value + self._cost[s, j][low - held : SLOTS + 1 - held]
            better = value < best[low:]
            best[low:][better], choice[low:][better] = value[better], s
        self._cost[i, j], self._choice[i, j] = best, choice

    def plan(self, slots: int) -> list[frozenset[int]] | None:
        """What is kept when each block is about to go back, the last block first."""
        count = len(self._chain.blocks)
        if not np.isfinite(self._cost[0, count][slots]):
            return None
        found: list[frozenset[int]] = []
        # Runs of blocks still to go back, with what is kept meanwhile, innermost last.
        stack = [(0, count, slots, self._chain.blocks[0].crosses)]
        while stack:
            i, j, slots, held = stack.pop()
            choice = int(self._choice[i, j][slots])
            block = self._chain.blocks[i]
            if j == i + 1:
                found.append(held | block.own)  # done just now, or again
                continue
            if choice < 0:
                option = block.options[-1 - choice]
                stay = held | option.kept
                stack.append((i, i + 1, slots, stay))
                inner = self._round(option.bytes) + int(self._extra[i, i + 1])
                further = self._chain.blocks[i + 1].crosses
                stack.append((i + 1, j, slots - inner, stay | further))
            else:
                further = self._chain.blocks[choice].crosses
                stack.append((i, choice, slots, held))
                inner = int(self._extra[i, choice])
                stack.append((choice, j, slots - inner, held | further))
        return found
