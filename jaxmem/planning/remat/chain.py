"""Plans for a training step, seen as a chain of blocks: forward, then backward.

The forward pass is cut where few bytes cross, into few large blocks or many small ones.
What a block keeps of its own values is chosen at several prices of a byte
(`_remat_keep`); which blocks keep what, which beginnings are kept meanwhile and from
which a run of blocks is recomputed, nested as deep as it takes, is dynamic programming
over runs of blocks, for every amount of memory at once (`_remat_persistent`).

Of a chain of single operations the figures given to that are the bytes of the sequence;
of blocks of several they are only near them, so every plan is evaluated, and mended, by
the search.

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

BLOCKS = 80
PARTS = (BLOCKS, 30, 20, 14, 8, 5)  # of the bytes: what a block holds at most
SMALL = 0.01  # of a block's largest value
PLANS = 48, 60_000  # of each way of cutting: at least; operations in all of them
LONGEST = 2.5, 6_000  # operations of a sequence: times those of the graph; in any case


def chain_plans(
    tables: SequenceTables,
    cost: np.ndarray,
    plain: SequenceEvents,
    known: Callable[[float], float] = lambda size: math.inf,
    late: Callable[[], bool] = lambda: False,
) -> Iterator[np.ndarray]:
    """Sequences, from those that take much memory to those that take little.

    Args:
      tables: the graph.
      cost: of each operation.
      plain: every operation once.
      known: bytes -> the least cost of what is known within them. Plans that promise no
        less are left out.
      late: whether to stop; the plans of one way of cutting are not cut short.
    """
    passes, before = ForwardPass(tables, plain), set()
    for parts in PARTS:
        if late():
            return
        cuts = tuple(passes.cuts(parts))
        if cuts not in before and 3 <= len(cuts) <= BLOCKS:
            before.add(cuts)
            plans = _plans(_BlockChain(passes, cost, cuts), known)
            yield from itertools.takewhile(lambda _: not late(), plans)


def _plans(
    blocks: "_BlockChain", known: Callable[[float], float]
) -> Iterator[np.ndarray]:
    """Of one way of cutting, from much memory to little."""
    count = blocks.passes.count
    stages = blocks.stages()
    schedules = ChainSchedules(stages, float(blocks.passes.profile.max()))
    points, most = len(schedules.bytes), max(PLANS[0], PLANS[1] // count)
    chosen = np.arange(points)
    if points > most:
        ends = np.geomspace(max(schedules.bytes[0], 1.0), schedules.bytes[-1], most)
        chosen = np.unique(np.searchsorted(schedules.bytes, ends, "right") - 1)
    once = float(stages.cost.sum())
    for point in reversed(chosen.tolist()):
        if schedules.cost[point] - once >= known(schedules.bytes[point]) * (1 - ALIKE):
            continue
        sequence = blocks.sequence(schedules.plan(point))
        yield sequence
        if len(sequence) > max(LONGEST[0] * count, LONGEST[1]):
            return


@dataclass(frozen=True)
class _ChainBlock:
    """A run of forward operations.

    Attributes:
      start, stop: the operations.
      back: the first operation of the backward pass that reads of its own.
      own: its values but for those that stay.
      wanted: those of them that the backward pass reads.
      outgoing: those of them that later blocks read.
    """

    start: int
    stop: int
    back: int
    own: frozenset[int]
    wanted: frozenset[int]
    outgoing: frozenset[int]


class _BlockChain:
    """The forward pass in blocks that begin at some operations."""

    def __init__(self, passes: ForwardPass, cost: np.ndarray, cuts: Sequence[int]):
        self.passes, self._cost = (
            passes,
            np.where(passes.tables.recomputable, cost, 0.0),
        )
        pairs = zip(cuts, [*cuts[1:], passes.end], strict=True)
        blocks = [self._block(start, stop) for start, stop in pairs]
        # A block goes backward no later than the one before it.
        backs = np.minimum.accumulate([b.back for b in blocks]).tolist()
        early: set[int] = set()
        for block, back, later in zip(blocks, backs, [*backs[1:], 0], strict=True):
            # What goes out is there, too, while the next block goes backward.
            inner = block.wanted - block.outgoing
            since = back if inner else later
            early |= {
                v for v in inner or block.wanted if passes.backward_reader[v] < since
            }
        self.permanent = passes.permanent | early
        self.blocks = [
            replace(
                block,
                back=back,
                own=block.own - early,
                wanted=block.wanted - early,
                outgoing=block.outgoing - early,
            )
            for block, back in zip(blocks, backs, strict=True)
        ]
        self.crosses = [self._crossing(b.start) for b in self.blocks] + [frozenset()]

    def _block(self, start: int, stop: int) -> _ChainBlock:
        """A block by itself.

        It begins to go backward where what it keeps inside is read. A mask or a number
        may be read long before the rest: that does not count, and it stays.
        """
        passes, tables = self.passes, self.passes.tables
        made = {v for makes in tables.makes[start:stop] for v in makes}
        own = made - passes.permanent
        outgoing = {v for v in own if passes.last_forward[v] >= stop}
        wanted = {v for v in own if v in passes.backward_reader}
        inner = wanted - outgoing
        small = SMALL * max((tables.size[v] for v in inner or wanted), default=0.0)
        large = [v for v in inner or wanted if tables.size[v] >= small]
        first = (
            passes.backward_reader.__getitem__ if inner else partial(self._first, stop)
        )
        back = min([passes.count, *map(first, large)])
        return _ChainBlock(start, stop, back, *map(frozenset, (own, wanted, outgoing)))

    def _first(self, stop: int, v: int) -> int:
        """The first to read `v`, and of later blocks nothing, in the backward pass.

        Who reads of both belongs to the later block, for which `v` is there anyway.
        """
        passes, tables = self.passes, self.passes.tables
        for i in tables.graph.readers[v]:
            if i >= passes.end and not any(
                stop <= tables.maker[u] < passes.end and u not in passes.permanent
                for u in tables.reads[i]
            ):
                return i
        return passes.backward_reader[v]

    def _crossing(self, start: int) -> frozenset[int]:
        """What is made before an operation and read by it or later, going forward."""
        maker = self.passes.tables.maker
        return frozenset(
            v
            for v, last in self.passes.last_forward.items()
            if maker[v] < start <= last and v not in self.permanent
        )

    @cached_property
    def options(self) -> list[list[BlockOption]]:
        """What each block may keep, from all to as little as it takes."""
        tables = self.passes.tables
        return [
            options(tables, self._cost, b.start, b.stop, b.wanted, b.outgoing)
            for b in self.blocks
        ]

    def stages(self) -> ChainFigures:
        """The chain as figures."""
        size, blocks, crosses = self.passes.tables.size, self.blocks, self.crosses
        total = lambda values: float(size[list(values)].sum())
        forward = self._forward()
        return ChainFigures(
            np.array([[f[b.start : b.stop].max() for b in blocks] for f in forward]),
            np.array([[total(s - i) for s in crosses] for i in crosses[:-1]]),
            self._resting(),
            self._backward(),
            np.array(
                [
                    self._while_kept(f, b, b.wanted)
                    for f, b in zip(forward, blocks, strict=True)
                ]
            ),
            np.array([self._cost[b.start : b.stop].sum() for b in blocks]),
            np.array([self._remainder(b) for b in blocks]),
            [
                [
                    OptionFigures(o.bytes, self._while_kept(f, b, o.kept), o.cost)
                    for o in some
                ]
                for f, b, some in zip(forward, blocks, self.options, strict=True)
            ],
        )

    def _forward(self) -> list[np.ndarray]:
        """For each block: bytes of every operation beyond what crosses its beginning.

        In a sweep that keeps nothing.
        """
        passes, maker = self.passes, self.passes.tables.maker
        last = passes.last_forward
        waits = [v for v in last if v in passes.backward_reader or v in self.permanent]
        since = [int(maker[v]) if v in self.permanent else last[v] + 1 for v in waits]
        waiting = passes.sums(waits, since, [passes.end] * len(waits))
        live = (passes.profile - waiting[: passes.count])[: passes.end]
        found = []
        for cross in self.crosses[:-1]:
            there = list(cross)
            until = [last[v] + 1 for v in there]
            crossing = passes.sums(there, np.zeros(len(there)), until)
            found.append(live - crossing[: passes.end])
        return found

    def _while_kept(
        self, forward: np.ndarray, block: _ChainBlock, kept: Set[int]
    ) -> float:
        """Bytes while a block is done and keeps these values."""
        last, stop = self.passes.last_forward, block.stop
        some = [v for v in kept if last[v] + 1 < stop]
        held = self.passes.sums(some, [last[v] + 1 for v in some], [stop] * len(some))
        return float((forward + held[: self.passes.end])[block.start : stop].max())

    def _earlier(self) -> np.ndarray:
        """(blocks + 1, count + 2) bytes of earlier blocks that wait meanwhile."""
        passes, rows = self.passes, []
        for block in self.blocks:
            some = list(block.own)
            until = [passes.last[v] + 1 for v in some]
            rows.append(passes.sums(some, np.zeros(len(some)), until))
        return np.cumsum([np.zeros(passes.count + 2), *rows], axis=0)

    def _resting(self) -> np.ndarray:
        """What is there, but for values of earlier blocks, when each goes backward."""
        passes, maker = self.passes, self.passes.tables.maker
        values, held = list(passes.last), passes.tables.held_set
        ends = [passes.count if v in held else passes.last[v] for v in values]
        # Between operations: of what is made later or read no more there is nothing.
        alive = passes.sums(values, maker[values] + 1, np.array(ends) + 1)
        alive = alive[: passes.count] + passes.tables.waiting_outputs(
            np.arange(passes.count)
        )
        backs = [b.back for b in self.blocks]
        found = [
            alive[min(back, passes.count - 1)] - earlier[back]
            for back, earlier in zip(backs, self._earlier()[1:], strict=True)
        ]
        some = [v for v in self.permanent if maker[v] < passes.end]
        first = self.passes.tables.size[some].sum()  # of the first forward pass
        return np.array([0.0, *found[:-1], first])

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
        """What it costs to recompute a block when what goes out of it is there."""
        tables = self.passes.tables
        wanted = [int(tables.maker[v]) for v in block.wanted - block.outgoing]
        found, stack = set(wanted), wanted
        while stack:
            for u in tables.reads[stack.pop()]:
                i = int(tables.maker[u])
                if u in block.own - block.outgoing and i not in found:
                    found.add(i)
                    stack.append(i)
        return float(self._cost[list(found)].sum())

    def sequence(self, plan: Sequence[BackwardStep]) -> np.ndarray:
        """The sequence that keeps what the plan says while blocks go backward.

        Args:
          plan: what is in memory when the backward pass comes to the last block, the
            one before, and so on.
        """
        passes, blocks = self.passes, self.blocks
        ends = [passes.count, *(b.back for b in blocks)]
        stages = [list(range(blocks[-1].back))]
        kept: list[Set[int]] = [frozenset(passes.last)]
        for step in plan:
            stages.append(list(range(ends[step.block + 1], ends[step.block])))
            held = set(self._others[step.block])
            if step.block == len(blocks) - 1:
                held |= blocks[-1].own
            held.update(*(self.crosses[s] for s in step.crossings))
            held.update(*(self.options[i][k].kept for i, k in step.keepings))
            kept.append(held)
        return staged(passes.tables, stages, kept)

    @cached_property
    def _others(self) -> list[frozenset[int]]:
        """What no plan drops when each block goes backward.

        Of the forward pass what stays, and what later blocks made: it is read for the
        last time hereabouts.
        """
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
