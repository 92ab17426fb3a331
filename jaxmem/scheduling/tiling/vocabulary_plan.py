"""Loops over the vocabulary: what they do, what they hold and what they cost."""

import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxmem.cost.live_bytes import LiveBytes
from jaxmem.cost.parts import Price, sum_bytes
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.shards import Names, Shardings
from jaxmem.scheduling.tiling.vocabulary import CutAxis

LEAST_WORDS = 256  # of a block: a smaller product leaves most of a chip idle
_ALIGNED = 128  # of columns, which the units for products take at a time


@dataclass(frozen=True)
class OnlineSum:
    """A sum of exp(x - base), where `base` follows from a maximum in the same loop.

    Attributes:
      total: position of the sum.
      most: position of the maximum.
      base: what is subtracted, a number for each token.
      chain: equations that make it of the maximum, outside of the loops.
    """

    total: int
    most: int
    base: Any
    chain: tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """One loop over blocks of words.

    Attributes:
      eqns: what it does with a block, in order.
      sums: those of them whose results are combined over the blocks.
      written: variables whose blocks are written in place, for use outside.
      online: sums whose maximum is not known before the loop.
    """

    eqns: tuple[int, ...]
    sums: tuple[int, ...]
    written: tuple[Any, ...]
    online: tuple[OnlineSum, ...]


@dataclass(frozen=True)
class VocabularyLoops:
    """A region of a list of equations, in loops over blocks of the vocabulary.

    Attributes:
      graph: the list of equations.
      found: which of them are cut along the axis, and how.
      loops: in order.
      when: number of loops that an equation outside needs to be done before it.
      shardings: over devices. Where the vocabulary is sharded, a block has
        words of each device's shard, so that no device needs what another one has.
    """

    graph: JaxprGraph
    found: CutAxis
    loops: tuple[Loop, ...]
    when: Mapping[int, int]
    shardings: Shardings = field(default_factory=Shardings)

    @functools.cached_property
    def names(self) -> Names:
        """Over which axes of the mesh the vocabulary is sharded, in the logits."""
        logits = self.graph.eqns[self.found.product].outvars[0]
        return self.shardings.names(logits, self.found.axis[logits])

    @property
    def shards(self) -> int:
        """How many shards it has."""
        return self.shardings.size(self.names)

    @property
    def words(self) -> int:
        """How many words a shard has."""
        return self.found.size // self.shards

    @functools.cached_property
    def times(self) -> int:
        """How often the logits are computed."""
        return sum(self.found.product in loop.eqns for loop in self.loops)

    def block(self, n: int) -> int:
        """The words of a block where there are to be `n`; the last may have less."""
        size = self.words
        words = -(-size // n)
        if size % n and words > _ALIGNED:
            words = -(-words // _ALIGNED) * _ALIGNED
        return words

    def counts(self) -> Iterator[int]:
        """Numbers of blocks, the least first."""
        n = 2
        while n <= max(2, self.words // LEAST_WORDS):
            yield n
            n *= 2

    def held(self, n: int) -> int:
        """Bytes that a loop of `n` blocks holds: of a block, and its sums."""
        share = self.block(n) / self.words
        live = (self._live(loop.eqns) for loop in self.loops)
        sums = map(self._sums, self.loops)
        return int(max(s + share * x for s, x in zip(sums, live, strict=True)))

    @functools.cached_property
    def held_whole(self) -> int:
        """Bytes that are live at a time without loops, of what is cut."""
        return int(self._live(self.found.cut))

    def bytes(self, n: int) -> tuple[int, int]:
        """What all equations hold while the head runs: as it is, and in `n` blocks."""
        live = LiveBytes(self.graph, self.shardings)
        before = int(live.whole[sorted(self.found.cut)].max())
        return before, before - self.held_whole + self.held(n)

    def seconds(self, n: int, target: str) -> float:
        """What `n` blocks take longer than the equations as they are."""
        price = Price(target, self.shardings)
        whole = sum(price.whole(self.graph.eqns[i]) for i in self.found.cut)
        loops = (sum(self._block(price, i, n) for i in p.eqns) for p in self.loops)
        return price.longer(whole, loops, n)

    def _block(self, price: Price, i: int, n: int) -> float:
        return price.part(self.graph.eqns[i], self.found.cut[i], n)

    def _sums(self, loop: Loop) -> float:
        eqns = (self.graph.eqns[i] for i in loop.sums)
        return sum(sum_bytes(eqn, eqn.outvars[0], self.shardings) for eqn in eqns)

    def _live(self, eqns: Collection[int]) -> float:
        """Bytes of whole arrays that some of the equations make, alive at most."""
        live = LiveBytes(self.graph, self.shardings, eqns)
        users = self.graph.users
        inside = (v for v in live.sizes if v in self.found.axis and users.get(v))
        return live.profile({v: live.sizes[v] for v in inside}).max()
