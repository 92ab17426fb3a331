"""Loops over the vocabulary: what they do, what they hold and what they cost."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxmem.ir.costs import FUSED, MACHINES, flops, seconds
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.jaxprs import elements
from jaxmem.ir.scans import is_var, size_of
from jaxmem.ir.shards import Names, Spreads
from jaxmem.scheduling.tiling.sums import wide
from jaxmem.scheduling.tiling.vocabulary import CutAxis

LEAST_WORDS = 256  # of a block: a smaller product leaves most of a chip idle
_ALIGNED = 128  # of columns, which the units for products take at a time
_START = 5e-6  # seconds that an iteration waits for its kernels to be started


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
      spreads: how arrays are spread over devices. Where the vocabulary is, a block has
        words of each device's shard, so that no device needs what another one has.
    """

    graph: JaxprGraph
    found: CutAxis
    loops: tuple[Loop, ...]
    when: Mapping[int, int]
    spreads: Spreads = field(default_factory=Spreads)

    @functools.cached_property
    def names(self) -> Names:
        """Over which axes of the mesh the vocabulary is spread, in the logits."""
        logits = self.graph.eqns[self.found.product].outvars[0]
        return self.spreads.names(logits, self.found.axis[logits])

    @property
    def shards(self) -> int:
        """How many shards it has."""
        return self.spreads.size(self.names)

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
        held = (self._sums(p) + int(share * self._live(p.eqns)) for p in self.loops)
        return max(held)

    def held_whole(self) -> int:
        """Bytes that are live at a time without loops, of what is cut."""
        return self._live(sorted(self.found.cut))

    def extra_flops(self) -> float:
        """Of the products that are done more than once."""
        eqns = self.graph.eqns
        done = [i for loop in self.loops for i in loop.eqns]
        return sum(flops(eqns[i]) for i in done) - sum(
            flops(eqns[i]) for i in self.found.cut
        )

    def extra_seconds(self, n: int, target: str) -> float:
        """What `n` blocks cost: products twice, sums read and written n times."""
        machine, eqns = MACHINES[target], self.graph.eqns
        cost = lambda i: seconds(eqns[i], machine) or 0.0
        products = [i for i in self.found.cut if flops(eqns[i])]
        done = [i for loop in self.loops for i in loop.eqns if flops(eqns[i])]
        twice = sum(map(cost, done)) - sum(map(cost, products))
        moved = 2 * n * sum(map(self._sums, self.loops)) / machine.bandwidth
        return twice + moved + n * len(self.loops) * _START

    def _sums(self, loop: Loop) -> int:
        outs = (self.graph.eqns[i].outvars[0].aval for i in loop.sums)
        return sum(elements(v.shape) * wide(v.dtype).itemsize for v in outs)

    def _live(self, eqns: Sequence[int]) -> int:
        """Bytes of whole arrays that some of the equations make, alive at most."""
        buffers = {i: v for i in eqns if (v := self._buffer(i)) is not None}
        made: dict[Any, set[Any]] = {}  # variable -> buffers that it is made from
        last: dict[Any, int] = {}
        for i in eqns:
            ins = filter(is_var, self.graph.eqns[i].invars)
            read = set().union(*(made.get(a, ()) for a in ins))
            last.update(dict.fromkeys(read, i))
            for v in self.graph.eqns[i].outvars:
                made[v] = {v} if v is buffers.get(i) else read
        most, alive = 0, dict[Any, int]()
        for i, v in buffers.items():
            # an array may take the place of one that is read here for the last time
            free = 0 if self._is_fused(i) else 1
            alive = {
                u: size for u, size in alive.items() if last.get(u, -1) >= i + free
            }
            alive[v] = size_of(v)
            most = max(most, sum(alive.values()))
        return most

    def _buffer(self, i: int) -> Any:
        """What an equation makes, where the compiler has an array of it."""
        v = self.graph.eqns[i].outvars[0]
        users = [self.graph.eqns[k] for k in self.graph.users.get(v, ())]
        read = any(u.primitive.name == "dot_general" for u in users)
        inside = v in self.found.axis and bool(users)
        return v if inside and (read or not self._is_fused(i)) else None

    def _is_fused(self, i: int) -> bool:
        eqn, treated = self.graph.eqns[i], self.found.cut[i]
        return eqn.primitive.name in FUSED or treated.put
