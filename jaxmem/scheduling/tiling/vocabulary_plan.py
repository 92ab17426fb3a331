"""Which loop over the vocabulary does what, what they hold and what they cost."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.ir.costs import FUSED, MACHINES, flops, seconds
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.jaxprs import elements
from jaxmem.ir.scans import is_var, size_of
from jaxmem.scheduling.tiling.vocabulary import CutAxis

MOST_TIMES = 3  # that logits are computed: else they cost more than they save
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
    """

    graph: JaxprGraph
    found: CutAxis
    loops: tuple[Loop, ...]
    when: Mapping[int, int]

    @functools.cached_property
    def times(self) -> int:
        """How often the logits are computed."""
        return sum(self.found.product in loop.eqns for loop in self.loops)

    def block(self, n: int) -> int:
        """The words of a block where there are to be `n`; the last may have less."""
        size = self.found.size
        words = -(-size // n)
        if size % n and words > _ALIGNED:
            words = -(-words // _ALIGNED) * _ALIGNED
        return words

    def counts(self) -> Iterator[int]:
        """Numbers of blocks, the least first."""
        n = 2
        while n <= max(2, self.found.size // LEAST_WORDS):
            yield n
            n *= 2

    def held(self, n: int) -> int:
        """Bytes that a loop of `n` blocks holds: of a block, and its sums."""
        share = self.block(n) / self.found.size
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
            (out,) = self.graph.eqns[i].outvars
            made[out] = {out} if i in buffers else read
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
        (v,) = self.graph.eqns[i].outvars
        users = [self.graph.eqns[k] for k in self.graph.users.get(v, ())]
        read = any(u.primitive.name == "dot_general" for u in users)
        inside = v in self.found.axis and bool(users)
        return v if inside and (read or not self._is_fused(i)) else None

    def _is_fused(self, i: int) -> bool:
        eqn, treated = self.graph.eqns[i], self.found.cut[i]
        return eqn.primitive.name in FUSED or treated.put


def wide(dtype) -> Any:
    """In which dtype a sum of blocks is carried."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.dtype("float32") if narrow else dtype


def loops_of(graph: JaxprGraph, found: CutAxis) -> VocabularyLoops | str:
    """The loops; or why there are none."""
    return _Levels(graph, found).result()


class _Levels:
    """How many loops must be done before a value is there."""

    def __init__(self, graph: JaxprGraph, found: CutAxis):
        self.graph, self.found = graph, found
        self.known: dict[Any, int] = {}  # loops done before a whole value is there
        self.inside: dict[Any, int] = {}  # and before any block of it can be made
        self.online: dict[int, OnlineSum] = {}
        self.level: dict[int, int] = {}
        for i, eqn in enumerate(graph.eqns):
            if i in found.cut:
                self._cut(i, eqn)
            if i not in found.cut or i in found.repeated:
                level = max(map(self._whole, eqn.invars), default=0)
                self.known.update(dict.fromkeys(eqn.outvars, level))

    def _whole(self, a) -> int:
        return self.known.get(a, 0) if is_var(a) else 0

    def _operand(self, a, axis: int | None) -> int:
        cut = axis is not None and is_var(a) and a in self.inside
        return self.inside[a] if cut else self._whole(a)

    def _of_operands(self, i: int) -> int:
        ins = zip(self.graph.eqns[i].invars, self.found.cut[i].ins, strict=True)
        return max((self._operand(a, d) for a, d in ins), default=0)

    def _cut(self, i: int, eqn) -> None:
        level = self._of_operands(i)
        if self.found.cut[i].combine:
            online = self._online(i) if eqn.primitive.name == "reduce_sum" else None
            if online is not None:
                self.online[i] = online
                level = self.level[online.most]
            self.level[i] = level
        else:
            self.inside.update(dict.fromkeys(eqn.outvars, level))
        self.known.update(dict.fromkeys(eqn.outvars, level + 1))

    def _online(self, i: int) -> OnlineSum | None:
        """A sum of exponentials, times what is known before its maximum is."""
        eqns, v, factors = self.graph.eqns, self.graph.eqns[i].invars[0], []
        eqn = self._maker(v)
        while eqn is not None and eqn.primitive.name in ("convert_element_type", "mul"):
            late = max(eqn.invars, key=self._block_level)
            factors += [a for a in eqn.invars if a is not late]
            eqn = self._maker(late)
        exponential = eqn is not None and eqn.primitive.name == "exp"
        shifted = self._maker(eqn.invars[0]) if exponential else None
        if shifted is None or shifted.primitive.name != "sub":
            return None
        base = self._number_a_token(shifted.invars[1])
        ways = None if base is None else self._from_maximum(base)
        if base is None or ways is None:
            return None
        most, chain = ways
        level = self.level[most]
        others = max(map(self._block_level, [shifted.invars[0], *factors]))
        shape = tuple(d for d in base.aval.shape if d > 1)
        total = tuple(d for d in eqns[i].outvars[0].aval.shape if d > 1)
        if shape != total or others > level:
            return None
        return OnlineSum(i, most, base, chain)

    def _maker(self, a):
        i = self.graph.maker.get(a, -1) if is_var(a) else -1
        return self.graph.eqns[i] if i in self.found.cut else None

    def _block_level(self, a) -> int:
        return self._operand(a, 0)

    def _number_a_token(self, a):
        """What is subtracted, before it is spread over the words."""
        made = self._maker(a)
        if made is not None and made.primitive.name == "broadcast_in_dim":
            a = made.invars[0]
        return a if is_var(a) and a not in self.found.axis else None

    def _from_maximum(self, base) -> tuple[int, tuple[int, ...]] | None:
        """The maximum that is all a value needs of the loops, and the way from it."""
        cone = self.graph.cone([base])
        found = self.found
        sums = {i for i in cone if i in found.cut and found.cut[i].combine}
        outs = {self.graph.eqns[i].outvars[0]: i for i in sums}
        chain, reached, direct, others = [], set(), set(), set()
        for i in sorted(cone - found.cut.keys()):
            ins = set(filter(is_var, self.graph.eqns[i].invars))
            if ins & (outs.keys() | reached):
                chain.append(i)
                reached.update(self.graph.eqns[i].outvars)
                direct |= {outs[a] for a in ins if a in outs}
                others |= ins - reached - outs.keys()
        if base in outs:
            direct.add(outs[base])
        if len(direct) != 1:
            return None
        (most,) = direct
        later = any(self._whole(a) > self.level[most] for a in others)
        if found.cut[most].combine != "max" or later:
            return None
        if any(_compat.has_side_effects(self.graph.eqns[i]) for i in chain):
            return None
        return most, tuple(chain)

    def result(self) -> VocabularyLoops | str:
        graph, cut = self.graph, self.found.cut
        late = [i for i in sorted(cut) if i not in self.found.repeated]
        outside = set(graph.outputs)
        for i, eqn in enumerate(graph.eqns):
            if i not in cut or i in self.found.repeated:
                outside.update(filter(is_var, eqn.invars))
        written = [
            (i, v)
            for i in late
            if not cut[i].combine
            for v in graph.eqns[i].outvars
            if v in outside
        ]
        level = {i: self.level[i] for i in late if cut[i].combine}
        level |= {i: self.inside[v] for i, v in written}
        needed = self._needed_inside()
        if not needed & level.keys():
            return "no reduction over it is needed inside"
        count = 1 + max(level.values())
        # what nothing inside needs is done last, with what is there then
        level = {i: k if i in needed else count - 1 for i, k in level.items()}
        loops = tuple(self._loop(k, level, written) for k in range(count))
        plan = VocabularyLoops(graph, self.found, loops, self._when(level))
        if plan.times > MOST_TIMES:
            return (
                f"logits would be computed {plan.times} times: reductions need others"
            )
        return plan

    def _needed_inside(self) -> set[int]:
        """Equations that something whole comes from, which a block needs."""
        wholes = set()
        for i, treated in self.found.cut.items():
            ins = zip(self.graph.eqns[i].invars, treated.ins, strict=True)
            wholes |= {
                a for a, d in ins if is_var(a) and (d is None or a not in self.inside)
            }
        return self.graph.cone(wholes)

    def _when(self, level: dict[int, int]) -> dict[int, int]:
        """The loops that must be done before an equation outside of them."""
        done: dict[Any, int] = {}
        when: dict[int, int] = {}
        for i, eqn in enumerate(self.graph.eqns):
            if i in level:
                done.update(dict.fromkeys(eqn.outvars, level[i] + 1))
            elif i not in self.found.cut or i in self.found.repeated:
                ins = filter(is_var, eqn.invars)
                when[i] = max((done.get(a, 0) for a in ins), default=0)
                done.update(dict.fromkeys(eqn.outvars, when[i]))
        return when

    def _loop(self, k: int, level: dict[int, int], written: list) -> Loop:
        targets = {i for i, at in level.items() if at == k}
        blocks = self.inside.keys()
        eqns: set[int] = set()
        todo = list(targets)
        while todo:
            i = todo.pop()
            if i in eqns:
                continue
            eqns.add(i)
            ins = zip(self.graph.eqns[i].invars, self.found.cut[i].ins, strict=True)
            cut = (a for a, d in ins if d is not None and is_var(a) and a in blocks)
            todo += [self.graph.maker[a] for a in cut]
        sums = tuple(sorted(i for i in targets if self.found.cut[i].combine))
        online = (self.online[i] for i in sums if i in self.online)
        return Loop(
            tuple(sorted(eqns)),
            sums,
            tuple(v for i, v in written if i in targets),
            tuple(o for o in online if level[o.most] == k),
        )
