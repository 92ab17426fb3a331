"""The part of a step that is cut along an axis over which it has softmaxes.

The logits of a language model are tokens by vocabulary. Their softmax needs numbers
that are made of all words (the maximum, the sum of exponentials) before it is known for
any word, so that no single loop over words does it. Several do: each makes the logits
of a block of words anew, and all that it needs of the loops before it are numbers for
each token. The maximum and the sum of exponentials come from one loop: the sum so far
is rescaled where the maximum grows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from jaxmem.ir import primitives
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.jaxprs import elements
from jaxmem.ir.placements import REPLICATE, Partial, Placement, Placements, Shard, at
from jaxmem.ir.placements.propagate import Propagation
from jaxmem.ir.placements.rules import WHOLE, place
from jaxmem.ir.scans import is_var
from jaxmem.ir.shards import held_labels
from jaxmem.scheduling.tiling.masks import from_nothing
from jaxmem.scheduling.tiling.sums import is_arithmetic, is_move


@dataclass(frozen=True)
class CutAxis:
    """Equations that are done block by block along an axis, with reductions over it.

    Attributes:
      product: position of the product that makes the logits.
      size: the length of the axis: of the vocabulary.
      axis: variable -> which of its axes it is.
      cut: position of an equation -> how it treats the axis.
      repeated: those that are done outside as well, for others who need the result.
    """

    product: int
    size: int
    axis: Mapping[Any, int]
    cut: Mapping[int, Placements]
    repeated: frozenset[int]


def cut_axes(graph: JaxprGraph) -> Iterator[CutAxis | str]:
    """What is found for each product, the largest first; or why there is nothing."""
    maximised = _maximised(graph)
    of_softmax = lambda e: _is_linear_layer(e) and e.outvars[0] in maximised
    products = [i for i, e in enumerate(graph.eqns) if of_softmax(e)]
    products.sort(key=lambda i: -elements(graph.eqns[i].outvars[0].aval.shape))
    # every block makes its own part of them
    masks = {v for i in from_nothing(graph.eqns) for v in graph.eqns[i].outvars}
    taken: set[int] = set()
    for i in products:
        for axis in reversed(range(graph.eqns[i].outvars[0].aval.ndim)):
            if i in taken:
                break
            found = _Growth(graph=graph, product=i, start=axis, masks=masks).result()
            if isinstance(found, CutAxis):
                taken |= found.cut.keys()
            if found is not None:
                yield found


def _maximised(graph: JaxprGraph) -> set[Any]:
    """Variables of which a maximum is made without another product."""
    found: set[Any] = set()
    for eqn in reversed(graph.eqns):
        if primitives.is_product(eqn):
            continue
        is_maximum = eqn.primitive.name == "reduce_max"
        if is_maximum or not found.isdisjoint(eqn.outvars):
            found.update(filter(is_var, eqn.invars))
    return found


def _is_linear_layer(eqn) -> bool:
    if not primitives.is_dot(eqn):
        return False
    (_, batch) = eqn.params["dimension_numbers"]
    return not any(batch) and eqn.outvars[0].aval.ndim > 1


@dataclass
class _Growth(Propagation):
    """From the logits to all that is of tokens by vocabulary, and what makes it."""

    graph: JaxprGraph = field(kw_only=True)
    product: int = field(kw_only=True)
    start: int = field(kw_only=True)  # which axis of the product's output
    masks: set[Any] = field(kw_only=True)
    size: int = 0
    wide: set[Any] = field(default_factory=set)  # variables of tokens by vocabulary
    todo: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    blocked: list[int] = field(default_factory=list)

    def result(self) -> CutAxis | str | None:
        """What is cut; why it cannot be; None where there is no softmax."""
        logits = self.graph.eqns[self.product].outvars[0]
        self.size = logits.aval.shape[self.start]
        self._tell(logits, self.start, wide=True)
        self.todo.append(self.product)
        while self.todo:
            self._include(self.todo.pop())
        found = any(t.op == "max" for t in self.placed.values())
        if not found and not self._leads_to_maximum():
            return None
        if self.wide & self.graph.outputs:
            self.reasons.append("an array of all of it is an output of the step")
        if self.reasons:
            return self.reasons[0]
        repeated = frozenset(i for i in self.placed if not self._is_late(i))
        return CutAxis(self.product, self.size, self.axes, self.placed, repeated)

    def _leads_to_maximum(self) -> bool:
        """Whether there is a softmax behind what cannot be cut."""
        seen: set[int] = set()
        while self.blocked:
            i = self.blocked.pop()
            if i in seen:
                continue
            seen.add(i)
            for v in self.graph.eqns[i].outvars:
                users = self.graph.users.get(v, ())
                known = {k: primitives.of(self.graph.eqns[k]) for k in users}
                if any(of_user.name == "reduce_max" for of_user in known.values()):
                    return True
                self.blocked += [k for k in users if known[k].cheap]
        return False

    def _is_late(self, i: int) -> bool:
        """Whether an equation is done in the loops alone."""
        todo, seen = [i], {i}
        while todo:
            i = todo.pop()
            eqn, placements = self.graph.eqns[i], self.placed[i]
            if eqn.outvars[0] in self.wide or placements.op:
                return True
            operands = placements.operands(eqn)
            cut = [a for a, d in operands if d is not None and is_var(a)]
            if not self.wide.isdisjoint(cut):
                return True
            makers = {
                self.graph.maker.get(a, -1) for a in cut
            } & self.placed.keys() - seen
            seen |= makers
            todo += makers
        return False

    def _tell(self, v, axis: int, wide: bool) -> None:
        """That a variable is cut along an axis; its users follow where it is wide."""
        if self.of.setdefault(v, at(axis)) != at(axis):
            self.reasons.append("two axes of one array are the vocabulary")
        if wide and v not in self.wide and v not in self.masks:
            self.wide.add(v)
            self.todo += self.graph.users.get(v, ())

    def _include(self, i: int) -> None:
        """An equation, and what is cheap of what makes its operands."""
        operands = [self._included(i)]
        while operands:
            a = next(operands[-1], None)
            if a is None:
                operands.pop()
            elif (maker := self._pulled(a)) is not None:
                operands.append(self._included(maker))

    def _placements_of(self, i: int) -> Placements | str:
        """How an equation treats the axes of its operands and outputs that are known.

        What combines blocks is of `lax`, or "argmax", or "take" for rows looked up
        along the axis.
        """
        eqn, n = self.graph.eqns[i], self.size
        ins, outs = self.all_at(eqn.invars), self.all_at(eqn.outvars)
        looked_up = _looked_up(eqn, ins, outs)
        if looked_up is not None:
            return looked_up
        if eqn.primitive.name == "argmax" and ins[0] in [
            *map(Shard, eqn.params["axes"])
        ]:
            if jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating):
                return Placements((ins[0],), (Partial("argmax"),))
        # a block has words of every shard, and may be of as many as there are words
        held = primitives.is_constraint(eqn)
        table = held_labels(eqn, n) if held else self.graph.labels(i, n)
        found = place(eqn, ins, outs, n, table, single=True)
        if isinstance(found, str) or not found.op:
            return found
        if len(outs) > 1 or not is_arithmetic(found.op) or found.op == "mul":
            return WHOLE
        return found

    def _included(self, i: int) -> Iterator[Any]:
        """The operands of an equation that are cut with it, each when it is known."""
        if i in self.placed:
            return
        eqn = self.graph.eqns[i]
        placements = self._placements_of(i)
        if isinstance(placements, str):
            self.reasons.append(
                f"{primitives.quoted(eqn)} needs all of it: {placements}"
            )
            self.blocked.append(i)
            return
        self.placed[i] = placements
        for v, d in zip(eqn.outvars, placements.out_axes, strict=True):
            if d is not None:
                self._out(i, v, d)
        like = eqn.outvars[0]
        for a, d in placements.operands(eqn):
            if is_var(a) and d is not None:
                same = like in self.wide and a.aval.shape == like.aval.shape
                self._tell(a, d, wide=same and a in self.graph.maker)
                yield a

    def _out(self, i: int, v, d: int) -> None:
        """An output that is cut: of all the tokens, or of the vocabulary alone."""
        eqn = self.graph.eqns[i]
        reduces = primitives.is_reduction(eqn)
        sums = primitives.is_dot(eqn) or reduces
        of_wide = any(is_var(a) and a in self.wide for a in eqn.invars)
        self._tell(v, d, wide=of_wide and not sums)
        made = sums and i != self.product
        if made or (v not in self.wide and self._is_moved(i)):
            self.todo += self._mover(v)

    def _mover(self, v) -> list[int]:
        """What moves or casts a gradient alone: each block is written as it is then."""
        users = self.graph.users.get(v, ())
        if len(users) != 1 or v in self.graph.outputs:
            return []
        eqn = self.graph.eqns[users[0]]
        out = eqn.outvars[0]
        # a wider one is written where the caller gets it; others cast what they read
        wider = out.aval.dtype.itemsize > v.aval.dtype.itemsize
        moves = is_move(eqn)
        return users if moves and (out in self.graph.outputs or not wider) else []

    def _is_moved(self, i: int) -> bool:
        """Whether an equation moves a gradient, which a product or a sum has made."""
        eqn = self.graph.eqns[i]
        if not is_move(eqn):
            return False
        m = self.graph.maker.get(eqn.invars[0])
        return m in self.placed and m != self.product and self._is_late(m)

    def _pulled(self, a) -> int | None:
        """What makes an operand, to be done block by block too, where that is cheap."""
        i = self.graph.maker.get(a)
        if i is None or i in self.placed:
            return None
        eqn = self.graph.eqns[i]
        puts = primitives.is_scatter_add(eqn) and eqn.invars[0] in self.masks
        again = primitives.is_dot(eqn) and a in self.wide
        if primitives.of(eqn).cheap or puts or again:
            placements = self._placements_of(i)
            if not isinstance(placements, str):
                return i
        if a in self.wide:
            self.reasons.append(f"{primitives.quoted(eqn)} makes an array of its size")
        return None


def _looked_up(
    eqn, ins: Sequence[Placement], outs: Sequence[Placement]
) -> Placements | None:
    """Places along the axis named by indices: logits of the labels, one at a time."""
    gathers = primitives.is_gather(eqn)
    if not (gathers or primitives.is_scatter_add(eqn)):
        return None
    # a scatter's output is cut as its table is
    cut = ins[0] if gathers or outs[0] == REPLICATE else outs[0]
    numbers = eqn.params["dimension_numbers"]
    if not isinstance(cut, Shard):
        return None
    names = "collapsed_slice_dims", "start_index_map"
    if not gathers:
        names = "inserted_window_dims", "scatter_dims_to_operand_dims"
    if not all(cut.axis in getattr(numbers, name) for name in names):
        return None
    if gathers:
        return Placements((cut, REPLICATE), (Partial("take"),))
    return Placements((cut, REPLICATE, REPLICATE), (cut,))


def puts(eqn, placed: Placements) -> bool:
    """Whether it adds to places along the axis that are named by whole indices."""
    return primitives.is_scatter_add(eqn) and placed.ins[2] == REPLICATE
