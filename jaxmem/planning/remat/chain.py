"""Plans for a training step, seen as a chain of blocks: forward, then backward.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for
heterogeneous chains" (https://arxiv.org/abs/1911.13214), section 4, with several
choices a block as in Zhao et al., "Rockmate" (ICML 2023), section 3.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from jaxmem.planning.remat.block_options import BlockOption, options
from jaxmem.planning.remat.chain_schedules import (
    ALIKE,
    BackwardStep,
    ChainFigures,
    ChainSchedules,
    OptionFigures,
)
from jaxmem.planning.remat.forward_pass import ForwardPass
from jaxmem.planning.remat.sequence import SequenceEvents, SequenceTables, staged

BLOCKS = 80  # of a chain; the dynamic program is cubic in them
PARTS = (BLOCKS, 30, 20, 14, 8, 5)  # blocks into which the pass is cut, about
FEWEST = PARTS[1:]  # of which the dynamic program is a matter of a moment
SMALL = 0.01  # of a block's largest value: smaller ones do not delay its backward pass
PLANS = 48, 60_000  # of each chain: at least; the number of operations in all of them
LONGEST = 2.5, 6_000  # operations of a sequence: times those of the graph; at least


def chain_plans(
    tables: SequenceTables,  # the graph
    cost: np.ndarray,  # of each operation
    plain: SequenceEvents,  # every operation once
    known: Callable[[float], float] = lambda size: math.inf,  # bytes -> least cost
    late: Callable[[], bool] = lambda: False,  # whether to stop before another chain
) -> Iterator[np.ndarray]:
    """Sequences, from those that take much memory to those that take little."""
    # In a chain of single operations the dynamic program knows the exact bytes. With
    # blocks of several operations its figures are approximate, so the local search
    # evaluates every plan, and improves it.
    passes, tried = ForwardPass(tables, plain), set()
    for parts in PARTS:
        if late():
            return
        cuts = tuple(passes.cuts(parts))
        if cuts not in tried and 3 <= len(cuts) <= BLOCKS:
            tried.add(cuts)
            plans = _plans(_BlockChain(passes, cost, cuts), known)
            yield from itertools.takewhile(lambda _: not late(), plans)


def least_chain_plans(
    tables: SequenceTables, cost: np.ndarray, plain: SequenceEvents
) -> Iterator[np.ndarray]:
    """Of the chains that have few blocks, the sequence of each that takes least."""
    passes = ForwardPass(tables, plain)
    for cuts in dict.fromkeys(tuple(passes.cuts(parts)) for parts in FEWEST):
        if 3 <= len(cuts) <= max(FEWEST):
            blocks = _BlockChain(passes, cost, cuts)
            schedules = ChainSchedules(blocks.figures(), float(passes.profile.max()))
            if len(schedules.bytes):  # some within the peak
                yield blocks.sequence(schedules.plan(0))


def _plans(
    blocks: "_BlockChain", known: Callable[[float], float]
) -> Iterator[np.ndarray]:
    """The plans of one chain, from much memory to little."""
    count = blocks.passes.count
    figures = blocks.figures()
    schedules = ChainSchedules(figures, float(blocks.passes.profile.max()))
    points, most = len(schedules.bytes), max(PLANS[0], PLANS[1] // count)
    chosen = np.arange(points)
    if points > most:
        ends = np.geomspace(max(schedules.bytes[0], 1.0), schedules.bytes[-1], most)
        chosen = np.unique(np.searchsorted(schedules.bytes, ends, "right") - 1)
    once = float(figures.cost.sum())
    for point in reversed(chosen.tolist()):
        # A plan that promises no less than what is known is not worth evaluating.
        if schedules.cost[point] - once >= known(schedules.bytes[point]) * (1 - ALIKE):
            continue
        sequence = blocks.sequence(schedules.plan(point))
        yield sequence
        if len(sequence) > max(LONGEST[0] * count, LONGEST[1]):
            return


@dataclass(frozen=True)
class _ChainBlock:
    """A run of forward operations."""

    start: int  # its first operation
    stop: int  # the one after its last
    back: int  # the first operation of the backward pass that reads the block's values
    values: frozenset[int]  # its values, except permanent ones
    read_backward: frozenset[int]  # those of them that the backward pass reads
    outgoing: frozenset[int]  # those of them that later blocks read


class _BlockChain:
    """The forward pass as a chain of blocks that begin at given operations."""

    def __init__(self, passes: ForwardPass, cost: np.ndarray, cuts: Sequence[int]):
        self.passes = passes
        self._cost = np.where(passes.tables.recomputable, cost, 0.0)
        pairs = zip(cuts, [*cuts[1:], passes.end], strict=True)
        blocks = [self._block(start, stop) for start, stop in pairs]
        # A block goes backward no later than the one before it.
        backs = np.minimum.accumulate([b.back for b in blocks]).tolist()
        early: set[int] = set()
        for block, back, later in zip(blocks, backs, [*backs[1:], 0], strict=True):
            # An outgoing value is in memory while the next block goes backward, too.
            inner = block.read_backward - block.outgoing
            since = back if inner else later
            reader = passes.backward_reader
            early |= {v for v in inner or block.read_backward if reader[v] < since}
        self.permanent = passes.permanent | early  # values that no plan drops
        self.blocks = [
            replace(
                block,
                back=back,
                values=block.values - early,
                read_backward=block.read_backward - early,
                outgoing=block.outgoing - early,
            )
            for block, back in zip(blocks, backs, strict=True)
        ]
        # The values that cross the beginning of each block; none at the end.
        self.crosses = [self._crossing(b.start) for b in self.blocks] + [frozenset()]

    def _block(self, start: int, stop: int) -> _ChainBlock:
        """A block by itself."""
        # It begins to go backward where its inner values are first read. A mask or a
        # scalar may be read long before the others: it does not count, and is
        # permanent.
        passes, tables = self.passes, self.passes.tables
        made = {v for makes in tables.makes[start:stop] for v in makes}
        values = made - passes.permanent
        outgoing = {v for v in values if passes.last_forward[v] >= stop}
        reader = passes.backward_reader
        read = {v for v in values if v in reader}
        inner = read - outgoing
        small = SMALL * max((tables.size[v] for v in inner or read), default=0.0)
        large = [v for v in inner or read if tables.size[v] >= small]
        first = reader.__getitem__ if inner else partial(self._first, stop)
        back = min([passes.count, *map(first, large)])
        return _ChainBlock(start, stop, back, *map(frozenset, (values, read, outgoing)))

    def _first(self, stop: int, v: int) -> int:
        """The first backward operation that reads `v` and nothing of later blocks."""
        # An operation that reads of both belongs to the later block, for which `v` is
        # in memory anyway.
        passes, tables = self.passes, self.passes.tables
        for i in tables.graph.readers[v]:
            if i >= passes.end and not any(
                stop <= tables.maker[u] < passes.end and u not in passes.permanent
                for u in tables.reads[i]
            ):
                return i
        return passes.backward_reader[v]

    def _crossing(self, start: int) -> frozenset[int]:
        """Values made before an operation and read by it or later in the pass."""
        maker = self.passes.tables.maker
        return frozenset(
            v
            for v, last in self.passes.last_forward.items()
            if maker[v] < start <= last and v not in self.permanent
        )

    @cached_property
    def options(self) -> list[list[BlockOption]]:
        """What each block may keep, from all values to as few as possible."""
        tables = self.passes.tables
        return [
            options(tables, self._cost, b.start, b.stop, b.read_backward, b.outgoing)
            for b in self.blocks
        ]

    def figures(self) -> ChainFigures:
        """The bytes and costs of the chain."""
        size, blocks, crosses = self.passes.tables.size, self.blocks, self.crosses
        total = lambda values: float(size[list(values)].sum())
        forward = self._forward()
        pairs = list(zip(forward, blocks, strict=True))
        return ChainFigures(
            np.array([[f[b.start : b.stop].max() for b in blocks] for f in forward]),
            np.array([[total(s - i) for s in crosses] for i in crosses[:-1]]),
            self._resting(),
            self._backward(),
            np.array([self._while_kept(*p, p[1].read_backward) for p in pairs]),
            np.array([self._cost[b.start : b.stop].sum() for b in blocks]),
            np.array([self._remainder(b) for b in blocks]),
            [
                [
                    OptionFigures(o.bytes, self._while_kept(f, b, o.values), o.cost)
                    for o in some
                ]
                for (f, b), some in zip(pairs, self.options, strict=True)
            ],
        )

    def _forward(self) -> list[np.ndarray]:
        """Bytes of every operation in a sweep from each block that keeps nothing."""
        # Without those of the values that cross the block's beginning.
        passes, maker = self.passes, self.passes.tables.maker
        last = passes.last_forward
        waits = [v for v in last if v in passes.backward_reader or v in self.permanent]
        since = [int(maker[v]) if v in self.permanent else last[v] + 1 for v in waits]
        waiting = passes.sums(waits, since, [passes.end] * len(waits))
        live = (passes.profile - waiting[: passes.count])[: passes.end]
        rows = []
        for cross in map(list, self.crosses[:-1]):
            until = [last[v] + 1 for v in cross]
            crossing = passes.sums(cross, np.zeros(len(cross)), until)
            rows.append(live - crossing[: passes.end])
        return rows

    def _while_kept(
        self, forward: np.ndarray, block: _ChainBlock, kept: Set[int]
    ) -> float:
        """The most bytes while a block runs and keeps these values."""
        last, stop = self.passes.last_forward, block.stop
        some = [v for v in kept if last[v] + 1 < stop]
        held = self.passes.sums(some, [last[v] + 1 for v in some], [stop] * len(some))
        return float((forward + held[: self.passes.end])[block.start : stop].max())

    def _earlier(self) -> np.ndarray:
        """(blocks + 1, count + 2) bytes of earlier blocks' values at each operation."""
        passes, rows = self.passes, []
        for block in self.blocks:
            some = list(block.values)
            until = [passes.last[v] + 1 for v in some]
            rows.append(passes.sums(some, np.zeros(len(some)), until))
        return np.cumsum([np.zeros(passes.count + 2), *rows], axis=0)

    def _resting(self) -> np.ndarray:
        """Bytes alive when each block goes backward, without earlier blocks."""
        passes, maker = self.passes, self.passes.tables.maker
        values, held = list(passes.last), passes.tables.held_set
        ends = [passes.count if v in held else passes.last[v] for v in values]
        # Between operations: a value is alive after its maker up to its last reader.
        alive = passes.sums(values, maker[values] + 1, np.array(ends) + 1)
        alive = alive[: passes.count] + passes.tables.waiting_outputs(
            np.arange(passes.count)
        )
        backs = [b.back for b in self.blocks]
        resting = [
            alive[min(back, passes.count - 1)] - earlier[back]
            for back, earlier in zip(backs, self._earlier()[1:], strict=True)
        ]
        some = [v for v in self.permanent if maker[v] < passes.end]
        first = self.passes.tables.size[some].sum()  # of the first forward pass
        return np.array([0.0, *resting[:-1], first])

    def _backward(self) -> np.ndarray:
        """Bytes while each block goes backward, beyond those of earlier blocks."""
        passes, earlier = self.passes, self._earlier()
        stops = [passes.count, *(b.back for b in self.blocks)]
        starts = [*(b.back for b in self.blocks[:-1]), passes.end]
        rest = passes.profile - earlier[:-1, : passes.count]
        return np.array(
            [
                max(0.0, float(rest[k, start:stop].max(initial=0.0)))
                for k, (start, stop) in enumerate(zip(starts, stops[:-1], strict=True))
            ]
        )

    def _remainder(self, block: _ChainBlock) -> float:
        """The cost of recomputing a block whose outgoing values are in memory."""
        tables = self.passes.tables
        wanted = [int(tables.maker[v]) for v in block.read_backward - block.outgoing]
        found, stack = set(wanted), wanted
        while stack:
            for u in tables.reads[stack.pop()]:
                i = int(tables.maker[u])
                if u in block.values - block.outgoing and i not in found:
                    found.add(i)
                    stack.append(i)
        return float(self._cost[list(found)].sum())

    def sequence(self, plan: Sequence[BackwardStep]) -> np.ndarray:
        """The sequence of a plan."""
        passes, blocks = self.passes, self.blocks
        ends = [passes.count, *(b.back for b in blocks)]
        stages = [list(range(blocks[-1].back))]
        kept: list[Set[int]] = [frozenset(passes.last)]
        for step in plan:
            stages.append(list(range(ends[step.block + 1], ends[step.block])))
            held = set(self._others[step.block])
            if step.block == len(blocks) - 1:
                held |= blocks[-1].values
            held.update(*(self.crosses[s] for s in step.crossings))
            held.update(*(self.options[i][k].values for i, k in step.options))
            kept.append(held)
        return staged(passes.tables, stages, kept)

    @cached_property
    def _others(self) -> list[frozenset[int]]:
        """Values that no plan drops when each block goes backward."""
        # Those of the backward pass, permanent ones, and those of later blocks: they
        # are read for the last time about then.
        passes, maker = self.passes, self.passes.tables.maker
        return [
            frozenset(
                v
                for v in passes.last
                if v not in passes.last_forward
                or v in self.permanent
                or maker[v] >= block.stop
            )
            for block in self.blocks
        ]
