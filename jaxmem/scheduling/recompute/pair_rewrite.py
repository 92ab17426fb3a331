"""A pair of scans, what the second of them recomputes, and both rebuilt."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax

from jaxmem._bits import pack_bits, unpack_bits
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.fused import fused_only
from jaxmem.ir.graph import JaxprGraph, Values
from jaxmem.ir.part_marks import innermost_operations
from jaxmem.ir.scans import is_mask, is_var, size_of, split
from jaxmem.scheduling.recompute.minimum_cut import needed
from jaxmem.scheduling.recompute.pairs import LoopCarried, Pair
from jaxmem.scheduling.recompute.to_host import Offloaded


@dataclass(frozen=True)
class PairRewrite:
    """A pair of scans, and what the second recomputes."""

    pair: Pair  # the scans
    # position among the xs of the backward scan -> variable of the forward body, of the
    # residuals that are no longer stacked
    slots: dict[int, Any]
    # those of them that come from the iteration before
    loop_carried: tuple[LoopCarried, ...]
    stays: dict[int, Any]  # the same of residuals that are stacked as before
    # variables of the forward body that are stacked in their place
    instead: tuple[Any, ...]
    away: Offloaded  # those of them that wait in the host's memory
    layers: int  # in how many of the layers, the first of the forward scan
    draws_once: bool = False  # as `draws.DrawnOnce` has masks

    @property
    def kept(self) -> list[Any]:
        """Variables of the forward body that it stacks for the backward one."""
        return [*self.instead, *self.stays.values()]

    @property
    def body(self) -> JaxprGraph:
        return self.pair.body

    @property
    def sent(self) -> list[Any]:
        """Those of what is kept instead that go to the host's memory."""
        return [v for v in self.instead if v in self.away.variables]

    @property
    def known(self) -> set[Any]:
        """What the backward body is given of the forward body's variables."""
        return {*self.instead, *self.stays.values(), *self.pair.inputs}

    @property
    def wanted(self) -> list[Any]:
        carried = {x.slot for x in self.loop_carried}
        now = [v for slot, v in self.slots.items() if slot not in carried]
        return [*now, *(x.source for x in self.loop_carried)]

    @property
    def evaluated(self) -> list[int]:
        """Positions of the forward body's equations that the second scan evaluates."""
        return needed(self.body, self.wanted, self.known)

    @property
    def inputs(self) -> set[Any]:
        """Inputs of the forward body that the second scan needs for them."""
        return {*read_by(self.body, self.evaluated), *self.wanted}

    def described(self) -> Iterator[tuple[Any, Any, str, int, int]]:
        """(aval, equation, words, 1, shards) of stacks saved; -1: kept instead."""
        carried = {x.slot for x in self.loop_carried}
        here = [v for v in self.instead if v not in self.away.variables]
        instead = [v for v in here if not is_mask(v)]
        for slot, v in self.slots.items():
            like = [w for w in instead if size_of(w) == size_of(v)]
            if like and slot not in carried:
                instead.remove(like[0])
                continue
            aval = self.pair.stacks[slot].aval
            aval = jax.ShapeDtypeStruct((self.layers, *aval.shape[1:]), aval.dtype)
            words = self._words(slot in carried, v)
            yield aval, self.maker(v), words, 1, self.pair.shards(v)
        for v in [*instead, *filter(is_mask, here)]:
            aval, words = stacked(v, self.layers), _words_instead(v)
            yield aval, self.maker(v), words, -1, self.pair.shards(v)

    @property
    def offloaded_bytes(self) -> int:
        return round(self.layers * self.pair.kept_on_device(self.away.variables))

    @property
    def recomputed(self) -> list[tuple[Any, int]]:
        """(equation, how often) of what is recomputed and costs something."""
        eqns = [self.body.eqns[i] for i in self.evaluated]
        return [(e, self.layers) for e in eqns if self.pair.is_paid(e)]

    def maker(self, v):
        """The equation of the forward body that makes a variable, if one does."""
        return self.body.eqns[self.body.maker[v]] if v in self.body.maker else None

    def _words(self, loop_carried: bool, v) -> str:
        if v in self.away.variables:
            return "itself, from the host's memory"
        if v in self.instead:
            return "itself in bits"
        if loop_carried:
            return "of the next layer's input, which the backward scan has just read"
        eqns = [self.body.eqns[i] for i in needed(self.body, [v], self.known)]
        ins = {w for e in eqns for w in e.invars if is_var(w)} | {v}
        if ins & {*self.instead, *self.stays.values()}:
            return _words_for(eqns)
        return "an input of the forward scan"


def read_by(body: JaxprGraph, positions: Sequence[int]) -> Iterator[Any]:
    """The variables that equations of a body read."""
    for i in positions:
        yield from filter(is_var, body.eqns[i].invars)


def _words_instead(v) -> str:
    packed = "a mask, eight elements to the byte"
    return packed if is_mask(v) else "others are computed from it"


def _words_for(eqns: Sequence[Any]) -> str:
    """What is done to residuals to recompute another one."""
    eqns = [one for eqn in eqns for one in innermost_operations(eqn)]
    if all(primitives.of(e).moves for e in eqns):
        return "another residual"
    if all(fused_only(e) is not None for e in eqns):
        return "elementwise of other residuals"
    paid = (e.primitive.name for e in eqns if fused_only(e) is None)
    return f"recomputed by {', '.join(dict.fromkeys(paid))}"


def packed(v, value):
    return pack_bits(value) if is_mask(v) else value


def unpacked(v, value):
    return unpack_bits(value, v.aval.shape) if is_mask(v) else value


def stacked(v, rows: int) -> jax.ShapeDtypeStruct:
    """That many rows of what `packed` makes of a variable."""
    row = jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
    row = jax.eval_shape(pack_bits, row) if is_mask(v) else row
    return jax.ShapeDtypeStruct((rows, *row.shape), row.dtype)


class RewrittenPair(Protocol):
    """A pair of scans that is rebuilt."""

    @property
    def pair(self) -> Pair: ...

    @property
    def inputs(self) -> set[Any]:
        """Inputs of the forward body that the second scan needs too."""
        ...


def rebuilt(closed, plan: RewrittenPair, run_forward: Callable, run_backward: Callable):
    """The jaxpr with both scans replaced."""
    # `run_forward(equation, its values, plan)` gives its outputs, and what it keeps for
    # `run_backward(equation, its values, given, these outputs, what was kept)`.
    graph = JaxprGraph(closed)
    forward, backward = graph.eqns[plan.pair.forward], graph.eqns[plan.pair.backward]

    def run(args: list) -> list:
        values = Values(graph, graph.inputs(args))
        values.evaluate_before(plan.pair.forward)
        ins = [values.read(v) for v in forward.invars]
        outs, kept = run_forward(forward, ins, plan)
        values.put(plan.pair.forward, outs)
        values.evaluate_before(plan.pair.backward)
        own = given(forward, ins, plan)
        ins = [values.read(v) for v in backward.invars]
        values.put(plan.pair.backward, run_backward(backward, ins, own, outs, kept))
        return values.all_outputs()

    return jaxprs.retrace(closed, run)


class Given(NamedTuple):
    """Variables of the forward body: the same in every iteration, and stacked."""

    whole: dict[Any, Any]
    slices: dict[Any, Any]


def given(forward, values: list, plan: RewrittenPair) -> Given:
    """The inputs of the forward scan that the backward body needs."""
    read, body = plan.inputs, plan.pair.body
    consts, _, xs = split(forward, list(zip(body.arguments, values, strict=True)))
    whole, slices = ({v: x for v, x in part if v in read} for part in (consts, xs))
    return Given(body.constants | whole, slices)
