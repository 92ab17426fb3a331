"""Layers that are written out: the backward pass recomputes values of the forward one.

An equation belongs to the backward pass if it is a transposed one, or needs what one
has made. What the others make and these read is kept from one pass to the other; a cut
(`pairs.py`) says which of it to keep so that the rest can be recomputed.

What is made of arguments of few bits, such as the quantised weights of a frozen base,
is recomputed without a rate too: XLA would keep a wide copy of every layer's weights.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.ir import primitives
from jaxmem.ir.dequantized import is_few_bits
from jaxmem.ir.graph import JaxprGraph, Values, is_transposed, late_of
from jaxmem.ir.scans import barrier, is_mask, is_var
from jaxmem.scheduling._choice import Rate
from jaxmem.scheduling._pass import Level
from jaxmem.scheduling.recompute.gradient_ends import gradient_ends
from jaxmem.scheduling.recompute.minimum_cut import PricedBy, needed
from jaxmem.scheduling.recompute.pair_rewrite import packed, unpacked
from jaxmem.scheduling.recompute.pairs import Cut, Pair, cut
from jaxmem.scheduling.recompute.unrolled_cut import (
    made_together,
)


@dataclass(frozen=True)
class Unrolled:
    """What is recomputed outside of loops."""

    name: ClassVar[str] = "unrolled"
    # as `Recompute.rate`; None: only what arguments of few bits are cast to
    rate: Rate | None = None
    reductions: bool = False  # as `Recompute.reductions`
    # of how many layers one keeps its input, whatever the rate (`bottlenecks.py`); 0:
    # of none
    layer_inputs: int = 0


def weights_made_by(free: Set[int], pair: Pair) -> tuple[Pair, Cut]:
    """The operands of products that the equations `free` make, and no others."""
    weights = {i: v for i, v in pair.slots.items() if _is_in_product(pair.body, v)}
    others = {v for v in pair.slots.values() if v not in weights.values()}
    pair = replace(pair, slots=weights, inputs=pair.inputs | others)
    eqns = {id(pair.body.eqns[i]) for i in free}
    return pair, cut(pair, PricedBy(lambda eqn: 0.0 if id(eqn) in eqns else None))


def _is_in_product(graph: JaxprGraph, v) -> bool:
    """Whether a product reads it: moments of few bits are read where they are made."""
    users = (graph.eqns[i] for i in graph.users.get(v, ()))
    return any(map(primitives.is_product, users))


def not_kept(pair: Pair, found: Cut) -> list[Any]:
    """What of the values between the passes is not kept."""
    return [v for v in pair.slots.values() if v not in found.variables]


def has_both_passes(level: Level) -> bool:
    """Whether the forward pass may be in the list; a backward loop's is elsewhere."""
    return level.loop is None or not is_transposed(level.loop)


@dataclass
class Recomputed(Values):
    """Values, of which the backward pass sees only what is kept."""

    late: set[int] = field(kw_only=True)  # equations of the backward pass
    # variables that are kept, or cost nothing to have
    kept: set[Any] = field(kw_only=True)
    masks: set[Any] = field(default_factory=set)  # of those, the ones kept in bits
    # the newest values of those that are not
    recomputed: dict[Any, Any] = field(default_factory=dict)
    # what of them is made at once, by each of it
    together: dict[Any, tuple[Any, ...]] = field(default_factory=dict)
    newest: Any = None  # the floating array of the backward pass that was made last
    # masks that are kept, in bits
    bits: dict[Any, Any] = field(default_factory=dict)
    ends: set[Any] = field(default_factory=set)  # as of `gradient_ends`
    # those that were made since the last barrier
    ended: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, pair: Pair, found: Cut, args: Sequence[Any]) -> "Recomputed":
        graph = pair.body
        kept = {*found.variables, *pair.free}
        together = {v: group for group in made_together(pair, found) for v in group}
        masks = {v for v in found.variables if is_mask(v)}
        how = {"kept": kept, "together": together, "masks": masks}
        how |= {"late": late_of(graph), "ends": gradient_ends(graph, pair.inside())}
        return cls(graph, graph.inputs(args), **how)

    def apply(self, i: int) -> None:
        eqn = self.graph.eqns[i]
        if i not in self.late:
            super().apply(i)
            masks = (v for v in eqn.outvars if v in self.masks)
            self.bits |= {v: packed(v, self.env[v]) for v in masks}
            return
        gone = [v for v in eqn.invars if is_var(v) and self._is_gone(v)]
        missing = (v for v in gone if v not in self.recomputed)
        wanted = dict.fromkeys(w for v in missing for w in self.together.get(v, (v,)))
        self._make(list(wanted), self._anchor(eqn))
        values = [self._newest(v) if is_var(v) else self.read(v) for v in eqn.invars]
        outs = _compat.bind(eqn, values)
        self.put(i, outs)
        self.ended += [v for v in eqn.outvars if v in self.ends]
        floats = [v for v in eqn.outvars if jnp.issubdtype(v.aval.dtype, jnp.floating)]
        self.newest = floats[0] if floats else self.newest

    def _newest(self, v):
        return unpacked(v, self.bits[v]) if v in self.bits else self._stored(v)

    def _stored(self, v):
        self.read(v)  # in the body of a loop it may come later
        if v in self.bits:
            return self.bits[v]
        return self.recomputed[v] if v in self.recomputed else self.read(v)

    def _is_gone(self, v) -> bool:
        i = self.graph.maker.get(v)
        return i is not None and i not in self.late and v not in self.kept

    def _anchor(self, eqn):
        """A value of the backward pass that `eqn` reads, or else the newest."""
        for v in eqn.invars:
            if is_var(v) and self.graph.maker.get(v) in self.late:
                return v
        return self.newest

    def _to_wait_for(self, again: Sequence[int]) -> list[Any]:
        """Gradients that are done by now, where products are computed again."""
        # elementwise operations alone do not take the bytes that these would free
        if not any(primitives.is_product(self.graph.eqns[i]) for i in again):
            return []
        ended, self.ended = self.ended, []
        return ended

    def _make(self, wanted: Sequence[Any], anchor) -> None:
        """These values once more, when `anchor` is there."""
        # Right before their first reader, behind a barrier that waits for what the
        # reader's gradient depends on, and for what is done of other gradients: else
        # XLA would find that the values are there, and keep them.
        if not wanted:
            return
        eqns = needed(self.graph, wanted, {*self.kept, *self.recomputed})
        read = {v for i in eqns for v in self.graph.eqns[i].invars if is_var(v)}
        made = {v for i in eqns for v in self.graph.eqns[i].outvars}
        arguments = set(self.graph.invars)
        held = [v for v in self.graph.maker if v in read - made - arguments]
        given = [v for v in self.graph.invars if v in read]
        # XLA would keep what is made of arguments alone from the first time: a mask, or
        # the cast of codes that do not wait, beside their scales
        held += given if held else [v for v in given if is_few_bits(v)] or given[:1]
        known = {v: self._stored(v) for v in held}
        if anchor is not None and held:
            # whoever reads the anchor does so behind the barrier: XLA drops from one
            # what nobody reads there
            late = list(dict.fromkeys([anchor, *self._to_wait_for(eqns)]))
            values = barrier([*known.values(), *map(self.read, late)])
            known = dict(zip(held, values, strict=False))
            self.env.update(zip(late, values[len(held) :], strict=True))
        known = {v: unpacked(v, x) if v in self.bits else x for v, x in known.items()}
        inner = Values(self.graph, {v: self.env[v] for v in arguments} | known)
        inner.recompute(eqns)
        self.recomputed |= {v: inner.env[v] for v in made}
