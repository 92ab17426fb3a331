"""The loops over blocks of the vocabulary, in the place of what they do."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import _compat
from jaxmem.cost.parts import wide
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import Values
from jaxmem.ir.placements import Shard
from jaxmem.ir.placements.labels import Labels
from jaxmem.ir.placements.lower import PartValues
from jaxmem.ir.placements.rules import labels, same_axis
from jaxmem.ir.scans import is_var
from jaxmem.ir.shards import Names, held
from jaxmem.scheduling.tiling.gathered import held_whole, sharded_apart
from jaxmem.scheduling.tiling.loop import VOCABULARY
from jaxmem.scheduling.tiling.sums import constant, moves_behind, neutral, term
from jaxmem.scheduling.tiling.vocabulary import puts
from jaxmem.scheduling.tiling.vocabulary_lookups import Part, filled, put, taken
from jaxmem.scheduling.tiling.vocabulary_plan import Loop, VocabularyLoops
from jaxmem.scheduling.tiling.vocabulary_shards import (
    VocabularyShards,
    combined_sum,
    rescaled_sum,
)


def in_blocks(closed, plan: VocabularyLoops, n: int):
    """The closed jaxpr with its loops over `n` blocks of the vocabulary."""

    def run(args: list) -> list:
        return _Run(plan.graph, plan.graph.inputs(args), plan=plan, n=n).outputs()

    return _compat.without_dead_code(jaxprs.retrace(closed, run))


@dataclass
class _Run(Values):
    """The values outside of the loops so far."""

    plan: VocabularyLoops = field(kw_only=True)
    n: int = field(kw_only=True)
    # of what loops read, where it has to be sharded in another way for them
    placed: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self):
        sums = (i for loop in self.plan.loops for i in loop.sums)
        self.tails = {i: self._tail(i) for i in sums}

    def in_loop(self, v):
        """The value of a variable for a loop, which was made before it."""
        return self.placed.get(v, self.env[v])

    def outputs(self) -> list:
        moved = {k for tail, _ in self.tails.values() for k in tail}
        for k in range(len(self.plan.loops) + 1):
            for i, when in sorted(self.plan.when.items()):
                if when == k and i not in moved:
                    self.evaluate(i)
            if k < len(self.plan.loops):
                self.env.update(_Blocks(self, self.plan.loops[k]).results())
        return [self.read(v) for v in self.graph.outvars]

    def _tail(self, i: int) -> tuple[list[int], Any]:
        """What moves a sum of products is done to each block's part of it."""
        eqn = self.graph.eqns[i]
        if not primitives.is_dot(eqn):
            return [], eqn.outvars[0]
        return moves_behind(self.graph, eqn.outvars[0], self.plan.found.cut)


@dataclass
class _Blocks:
    """One loop, and what comes of it."""

    run: _Run
    loop: Loop
    cut: Any = field(init=False)

    def __post_init__(self):
        self.graph, self.cut = self.run.graph, self.run.plan.found.cut
        self.axis = self.run.plan.found.axis
        self.online = {o.total: o for o in self.loop.online}
        self.most = {o.most for o in self.loop.online}
        self.shards = VocabularyShards(self.run.plan)
        self._place()

    def results(self) -> dict[Any, Any]:
        """The whole values that the loop makes."""
        plan = self.run.plan
        block = plan.block(self.run.n)
        count, rest = divmod(plan.words, block)
        written = [self._held(v, self._unwritten(v.aval)) for v in self.loop.written]
        carry = [self._first(i) for i in self.loop.sums], written
        carry = self.shards.first(carry, self.loop.written)
        carry = self._loop(carry, jnp.arange(count, dtype=jnp.int32) * block, block)
        if rest:
            carry = self._loop(carry, jnp.full(1, count * block, jnp.int32), rest)
        sums, written = carry
        pairs = zip(self.loop.written, written, strict=True)
        found = {v: self._held(v, x.reshape(v.aval.shape)) for v, x in pairs}
        totals = dict(zip(self.loop.sums, sums, strict=True))
        for i in self.loop.sums:
            end = self.run.tails[i][1]
            total: Any = self._last(i, self._of_all_shards(i, totals))
            found[end] = total.astype(end.aval.dtype)
        return found

    def _operands(self) -> Iterator[tuple[int, int]]:
        """(position of an equation, which operand): those not made in the loop."""
        # one variable may be read both block by block and as a whole, such as what is
        # compared with itself: the whole is made outside
        made = {v for i in self.loop.eqns for v in self.graph.eqns[i].outvars}
        bases = {online.base for online in self.loop.online}
        for i in self.loop.eqns:
            for k, a in enumerate(self.graph.eqns[i].invars):
                inside = bases if self.cut[i].in_axes[k] is None else made
                if is_var(a) and a not in inside:
                    yield i, k

    def _place(self) -> None:
        """What is sharded as nothing that it meets in the loop is gathered first."""
        plan, placed = self.run.plan, self.run.placed
        if plan.shardings.mesh is None:
            return
        outside = {self.graph.eqns[i].invars[k] for i, k in self._operands()}
        apart = [one for i in self.loop.eqns for one in self._apart(i)]
        found: list[tuple[Any, int, Names]] = []
        while apart:
            v, axis, names = apart.pop()
            if v in outside:
                found += [(v, axis, names)] if v not in placed else []
            else:  # of what made it
                apart += self._made_of(v, axis, names)
        placed |= held_whole(found, plan.shardings, self.run.read)

    def _apart(self, i: int) -> Iterator[tuple[Any, int, Names]]:
        eqn, table = self.graph.eqns[i], labels(self.graph.eqns[i], self.run.n)
        if isinstance(table, Labels):
            for k in range(len(eqn.invars)):
                yield from sharded_apart(eqn, table, self.run.plan.shardings, k)

    def _made_of(self, v, axis: int, names: Names) -> Iterator[tuple[Any, int, Names]]:
        """Axes that are the same axis of what an array is made of, sharded alike."""
        eqn = self.graph.eqns[self.graph.maker[v]]
        same = same_axis(eqn, len(eqn.invars), axis, self.run.n)
        for w, place in zip(eqn.invars, same or (), strict=False):
            if place is not None and self.run.plan.shardings.names(w, place) == names:
                yield w, place, names

    def _of_all_shards(self, i: int, totals: dict[int, Any]):
        """A sum, from those of the shards."""
        total, combine = totals[i], self.cut[i].op
        if self.shards.count == 1:
            return total
        if i in self.online:
            most = totals[self.online[i].most]
            bases = jax.vmap(partial(self.base, i))(most)
            return rescaled_sum(total, bases, self.base(i, most.max(0)))
        return combined_sum(combine, total, self.graph.eqns[i].outvars[0].aval.dtype)

    def _unwritten(self, aval):
        """What blocks are written to: all of it, so that it may have any values."""
        # Not zeros: XLA makes one array of these and of others (what rows are added to,
        # in a step), which would then be there all the time, and be copied.
        if self.run.plan.shardings.mesh is not None:  # else one device has the value
            value = lax.optimization_barrier(jnp.zeros((), aval.dtype))
            return jnp.broadcast_to(value, aval.shape)
        known = self.run.tails[self.run.plan.loops[0].sums[0]][1]
        if known not in self.run.env:
            return constant(aval, 0, aval.dtype)
        value = self.run.env[known].ravel()[0].astype(aval.dtype)
        return jnp.broadcast_to(_compat.typed_as(value, aval), aval.shape)

    def _loop(self, carry, starts, words: int):
        """The carry after blocks that start there."""
        cut = ((self.graph.eqns[i].invars[k], i, k) for i, k in self._operands())
        arrays = {
            a: self.run.in_loop(a)
            for a, i, k in cut
            if self.cut[i].in_axes[k] is not None
        }

        def step(carry, at):
            block = partial(self._block, at, words)
            return self.shards.each(block, self.loop.written, arrays)(carry), None

        # under the name scopes of what it does last: those of the backward pass, if any
        eqn = self.graph.eqns[self.loop.eqns[-1]]
        scan = lambda: lax.scan(step, carry, starts)[0]
        return _compat.in_context_of(eqn, jax.named_scope(VOCABULARY)(scan))

    def _first(self, i: int):
        """What a sum, or a maximum, starts from."""
        end = self.run.tails[i][1].aval
        combine = self.cut[i].op
        if combine == "take":  # of each token one block has a row
            return constant(end, 0, end.dtype)
        if combine == "argmax":
            of = self.graph.eqns[i].invars[0].aval.dtype
            return constant(end, -jnp.inf, of), constant(end, 0, wide(end.dtype))
        return neutral(combine, end)

    def _last(self, i: int, total):
        """A sum after the loop."""
        eqn = self.graph.eqns[i]
        if self.cut[i].op == "argmax":
            return total[1]
        if self.cut[i].op != "take":
            return total
        index = self.run.read(eqn.invars[1])
        return filled(eqn, index, self.cut[i].in_axes[0], total)

    def _block(self, at, words: int, first, carry, arrays: dict[Any, Any]):
        """The carry after one more block, which starts at `at` in its shard.

        `first`: the first word of the shard; `arrays`: its part of what is cut.
        """
        sums, written = carry
        totals = dict(zip(self.loop.sums, sums, strict=True))
        block = _Block(self, at, first + at, words, totals, arrays)
        for i in self.loop.eqns:
            block.evaluate(i)
        new = []
        for v, x in zip(self.loop.written, written, strict=True):
            value = block.values.env[v, Shard(self.axis[v])]
            x = lax.dynamic_update_slice_in_dim(x, value, at, self.axis[v])
            new.append(self._held(v, x))
        return [block.sums[i] for i in self.loop.sums], new

    def _held(self, v, x):
        """What is written, whole on each device if its words are sharded otherwise."""
        # A block of them would be those of one device, or of two.
        shardings, axis = self.run.plan.shardings, self.axis[v]
        if shardings.names(v, axis) in ((), self.run.plan.names):
            return x
        spec = shardings.of[v]
        return held(x, shardings.mesh, (*spec[:axis], (), *spec[axis + 1 :]))

    def base(self, i: int, most):
        """What is subtracted, were this the maximum."""
        # where all so far is -inf, any number will do: nothing has been added
        most = jnp.where(most == -jnp.inf, jnp.zeros_like(most), most)
        online = self.online[i]
        v = self.graph.eqns[online.most].outvars[0]
        env = {v: most.astype(v.aval.dtype)}
        read = lambda a: env[a] if is_var(a) and a in env else self.run.read(a)
        for k in online.chain:
            eqn = self.graph.eqns[k]
            outs = _compat.bind(eqn, [read(a) for a in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return env[online.base]


@dataclass
class _Block:
    """The values of a block of words."""

    blocks: _Blocks
    at: Any  # where it starts in its shard
    start: Any  # its first word
    words: int
    sums: dict[int, Any]
    arrays: dict[Any, Any]  # what is cut, of the shard
    bases: dict[Any, Any] = field(default_factory=dict)  # of the maximum so far
    before: dict[int, Any] = field(default_factory=dict)  # the base of earlier blocks

    def __post_init__(self):
        length, start = lambda _: self.words, lambda _: self.start
        about = self._whole, self._cut, length, start
        self.values = PartValues(*about, of_shard=True)

    def evaluate(self, i: int) -> None:
        eqn, placements = self.blocks.graph.eqns[i], self.blocks.cut[i]
        if i in self.sums:
            self._combine(i, eqn, self.values.operands(eqn, placements))
        elif puts(eqn, placements):
            args = self.values.operands(eqn, placements)
            outs = put(eqn, args, self._part_of(placements.out_axes[0]))
            self.values.put(eqn, placements, outs)
        else:
            self.values.run(eqn, placements)

    def _part_of(self, axis: int | None) -> Part:
        assert axis is not None
        return Part(axis, self.start, self.words)

    def _whole(self, v):
        return self.bases[v] if v in self.bases else self.blocks.run.in_loop(v)

    def _cut(self, v, axis: int, whole: Callable):
        del whole  # of the shard alone
        return lax.dynamic_slice_in_dim(self.arrays[v], self.at, self.words, axis)

    def _combine(self, i: int, eqn, args: list) -> None:
        total, combine = self.sums[i], self.blocks.cut[i].op
        if combine == "argmax":
            self.sums[i] = self._greatest(i, eqn, args)
            return
        if combine == "take":
            self.sums[i] = total + taken(
                eqn, args, self._part_of(self.blocks.cut[i].in_axes[0])
            )
            return
        tail = [self.blocks.graph.eqns[k] for k in self.blocks.run.tails[i][0]]
        part = term(eqn, args, tail, wide(eqn.outvars[0].aval.dtype))
        part = part.astype(total.dtype)
        if i in self.blocks.online:
            total = self._rescaled(i, total)
        if i in self.blocks.most:
            self.sums[i] = lax.max(total, part)
            self._rebase(i, total)
            return
        self.sums[i] = getattr(lax, combine)(total, part)

    def _rebase(self, most: int, total) -> None:
        """The maximum has grown: exponentials are of differences from the new one."""
        for i, online in self.blocks.online.items():
            if online.most == most:
                self.before[i] = self.blocks.base(i, total)
                self.bases[online.base] = self.blocks.base(i, self.sums[most])

    def _rescaled(self, i: int, total):
        base = self.bases[self.blocks.online[i].base]
        factor = jnp.exp((self.before[i] - base).astype(total.dtype))
        factor = factor.reshape(total.shape)
        # a factor of what nothing has been added to may be infinite
        return jnp.where(total == 0, total, total * factor)

    def _greatest(self, i: int, eqn, args: list):
        """The greatest so far, and where it is first."""
        most, where = self.sums[i]
        (at,) = _compat.bind(eqn, args)
        new = lax.reduce_max(args[0], eqn.params["axes"])
        ahead = ~(new <= most) & ~jnp.isnan(most)  # as `argmax`: NaN is the greatest
        at = at + self.start.astype(at.dtype)
        return jnp.where(ahead, new, most), jnp.where(ahead, at, where)
