"""Pairs of scans, forward and backward, and the least that the first may stack.

What the backward scan reads of the forward one is stacked, a layer on a layer. A `cut`
says what of the forward body to stack so that the rest can be made of it, at a price.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from jaxmem import _compat
from jaxmem.chips import Rates
from jaxmem.cost.equations import seconds
from jaxmem.ir import primitives
from jaxmem.ir.communication import gathered
from jaxmem.ir.fused import fused_only
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.part_marks import is_part
from jaxmem.ir.propagation import shardings_in
from jaxmem.ir.scans import is_on_host, is_var, split, xs_of
from jaxmem.ir.shards import InputShardings, Shardings
from jaxmem.scheduling.recompute.minimum_cut import (
    FusedAlone,
    Price,
    ShardedPrice,
    least,
    needed,
    price_of,
)

# How much dearer it is to keep what has no name, where only names should be kept.
_UNNAMED = 1000


@dataclass(frozen=True)
class LoopCarried:
    """A residual that is a layer's output and, in the carry, the next layer's input."""

    slot: int  # position among the xs of the backward scan
    source: Any  # the variable of the forward body from which the next layer makes it
    eqns: tuple[Any, ...]  # what is still to be done to `source`, one array each
    # all that is done to the carry, for the last layer, which has no next one
    chain: tuple[Any, ...]
    carry: int  # position of the carry


@dataclass(frozen=True)
class Pair:
    """A backward scan, and the forward scan whose stacks it reads."""

    forward: int  # positions of the scans
    backward: int  # positions of the scans
    body: JaxprGraph  # the graph of the forward body
    # position among the xs of the backward scan -> variable of the forward body, of the
    # residuals that only this scan reads
    slots: dict[int, Any]
    # the same of residuals that others read too, or that are in the host's memory
    # already
    fixed: dict[int, Any]
    # variables of the forward body that are inputs of the scan, not carries
    inputs: set[Any]
    loop_carried: tuple[LoopCarried, ...]  # residuals that the iteration before has had
    stacks: tuple[Any, ...]  # the xs of the backward scan
    length: int  # the number of layers
    # whether the forward scan is what was taken apart from one that keeps less, so that
    # only one iteration's stacks exist
    of_parts: bool = False
    # of a list outside of loops: the inputs of its layers, where they are kept
    layer_inputs: tuple[Any, ...] = ()
    # how the variables of the forward body are sharded over devices, when asked
    inside: Callable[[], Shardings] = field(
        default=Shardings, compare=False, repr=False
    )
    # seconds of a layer in the forward and in the backward scan on a chip, as far as
    # anybody can tell
    layer_seconds: Callable[[Rates], tuple[float, float]] = field(
        default=lambda rates: (0.0, 0.0), compare=False, repr=False
    )

    @property
    def free(self) -> set[Any]:
        """What the backward body has without keeping it."""
        return {*self.inputs, *self.fixed.values()}

    @property
    def bytes(self) -> int:
        """Bytes that a layer stacks on one device, for the backward scan alone."""
        return sum(map(self.inside().bytes_of, self.slots.values()))

    def gathered(self, eqn) -> list[tuple[Any, float]]:
        """(operand, bytes) that a device sends to gather operands of a product."""
        return list(gathered(eqn, self.inside()))

    def is_paid(self, eqn) -> bool:
        """Whether recomputing an equation of the forward body costs something."""
        return FusedAlone()(eqn, self.inside()) is None

    def priced(self, price: ShardedPrice) -> Price:
        """A price of the equations of the forward body."""
        inside = self.inside()
        return lambda eqn: price(eqn, inside)

    def shards(self, v) -> int:
        """Over how many devices a variable of the forward body is sharded."""
        return self.inside().shards(v)

    def kept_on_device(self, variables: Iterable[Any]) -> float:
        """Bytes of what is kept of a layer, on one device."""
        return sum(map(self.inside().kept_bytes_of, variables))


@dataclass(frozen=True)
class Cut:
    variables: tuple[Any, ...]  # of the forward body, that are kept
    # residuals that come from the iteration before
    loop_carried: tuple[LoopCarried, ...]
    bytes: float  # of what is kept of a layer, on one device
    price: float  # of what is recomputed
    # positions of the equations that are evaluated a second time
    recomputed: tuple[int, ...]

    @property
    def cost(self) -> float:
        return self.bytes + self.price


def pairs(closed, given: InputShardings | None = None) -> Iterator[Pair]:
    """The pairs among the equations of a jaxpr; not those inside of them.

    `given`: how the inputs of the jaxpr are sharded over devices.
    """
    graph = JaxprGraph(closed)
    for b, eqn in enumerate(graph.eqns):
        if not primitives.is_scan(eqn) or _compat.has_side_effects(eqn):
            continue
        made = (v for v in xs_of(eqn) if is_var(v) and v in graph.maker)
        for f in sorted({graph.maker[v] for v in made}):
            if _is_forward_of(graph.eqns[f], eqn):
                inside = partial(_inside, closed, given, graph.eqns[f])
                about = {"inside": inside, "of_parts": is_part(graph.eqns[f])}
                about["layer_seconds"] = partial(
                    _layer_seconds, closed, given, graph.eqns[f], eqn
                )
                yield replace(_pair(graph, f, b), **about)


def named(pair: Pair) -> dict[Any, str]:
    """Variables of the forward body that carry a `checkpoint_name`."""
    eqns = (e for e in pair.body.eqns if primitives.is_named(e))
    return {e.outvars[0]: e.params["name"] for e in eqns}


def cut_by_names(pair: Pair, price: ShardedPrice) -> Cut:
    """The cheapest cut that keeps what has a name, and otherwise only what it must."""
    names = named(pair)
    own = pair.inside().kept_bytes_of
    size = lambda v: own(v) * (1 if v in names else _UNNAMED)
    return _cut(pair, pair.priced(price), (), size)


def cut(pair: Pair, price: ShardedPrice, loop_carried: bool = True) -> Cut:
    """The cheapest cut; `loop_carried`: whether the iteration before may be used."""
    priced, inside = pair.priced(price), pair.inside()
    size = lambda v: price.kept(v, inside)
    best = _cut(pair, priced, (), size)
    for x in pair.loop_carried if loop_carried else ():
        other = _cut(pair, priced, (*best.loop_carried, x), size)
        if other.cost < best.cost:
            best = other
    return best


def _cut(
    pair: Pair,
    price: Price,
    carried: tuple[LoopCarried, ...],
    size: Callable[[Any], float],
) -> Cut:
    apart = {x.slot for x in carried}
    now = [v for slot, v in pair.slots.items() if slot not in apart]
    wanted = [*now, *(x.source for x in carried)]
    kept = tuple(least(pair.body, wanted, pair.free, price, size))
    recomputed = tuple(needed(pair.body, wanted, {*kept, *pair.free}))
    prices = (price_of(pair.body, i, price) or 0.0 for i in recomputed)
    return Cut(kept, carried, pair.kept_on_device(kept), sum(prices), recomputed)


def _inside(closed, given: InputShardings | None, eqn) -> Shardings:
    """How the variables of a scan's body are sharded."""
    return shardings_in(eqn.params["jaxpr"], shardings_in(closed, given).body(eqn))


def _layer_seconds(
    closed, given: InputShardings | None, forward, backward, rates: Rates
) -> tuple[float, float]:
    shardings = shardings_in(closed, given)
    took = (seconds(eqn, rates, shardings) or 0.0 for eqn in (forward, backward))
    layers = max(1, forward.params["length"])
    first, second = (one / layers for one in took)
    return first, second


def _is_forward_of(first, eqn) -> bool:
    # the backward scan reads the stacks from the other end: its layers are the same
    same = primitives.is_scan(first) and not _compat.has_side_effects(first)
    return (
        same
        and first.params["length"] == eqn.params["length"]
        and first.params["reverse"] != eqn.params["reverse"]
    )


def _pair(graph: JaxprGraph, f: int, b: int) -> Pair:
    forward, backward = graph.eqns[f], graph.eqns[b]
    body = JaxprGraph(forward.params["jaxpr"])
    slots: dict[int, Any] = {}
    fixed: dict[int, Any] = {}
    for slot, v in enumerate(xs_of(backward)):
        if is_var(v) and v in forward.outvars:
            inner = body.outvars[forward.outvars.index(v)]
            # what others read too is stacked whatever becomes of this pair
            own = all(u == b for u in graph.users[v]) and v not in graph.outputs
            own = own and not is_on_host(inner)
            if is_var(inner):
                (slots if own else fixed)[slot] = inner
    inputs = _inputs(forward, body)
    carried = tuple(_loop_carried(forward, body, slots))
    stacks, length = tuple(xs_of(backward)), forward.params["length"]
    return Pair(f, b, body, slots, fixed, inputs, carried, stacks, length)


def _inputs(forward, body: JaxprGraph) -> set[Any]:
    """Variables of the body that stand for inputs of the scan, carries excepted."""
    consts, _, xs = split(forward, body.arguments)
    return {*body.constants, *consts, *xs}


def _loop_carried(forward, body: JaxprGraph, slots) -> Iterator[LoopCarried]:
    """Residuals that are elementwise of one carry alone, as the body returns it."""
    begin = split(forward, body.arguments)[1]
    end = {v: k for k, v in enumerate(body.outvars[: len(begin)]) if is_var(v)}
    for slot, v in slots.items():
        chain: list[Any] = []
        while v not in end and v in body.maker and _moves(eqn := _eqn_of(body, v)):
            chain.insert(0, eqn)
            v = _operand(eqn)
        # a carry that the body hands on as it came is an input of every layer
        if v in end and v not in begin:
            source, rest = _same_of(body, begin[end[v]], chain)
            yield LoopCarried(slot, source, tuple(rest), tuple(chain), end[v])


def _eqn_of(body: JaxprGraph, v):
    return body.eqns[body.maker[v]]


def _operand(eqn):
    """The one variable that an equation reads; None where there are others."""
    read = list(dict.fromkeys(filter(is_var, eqn.invars)))
    return read[0] if len(read) == 1 else None


def _moves(eqn) -> bool:
    return _operand(eqn) is not None and fused_only(eqn) is not None


def _same_of(body: JaxprGraph, v, chain: list[Any]) -> tuple[Any, list[Any]]:
    """How far the body does the same to `v`: that variable, and what is left to do."""
    for i, eqn in enumerate(chain):
        users = (body.eqns[u] for u in body.users.get(v, ()))
        alike = [e for e in users if _alike(e, eqn)]
        if not alike:
            return v, chain[i:]
        v = alike[0].outvars[0]
    return v, []


def _alike(a, b) -> bool:
    """Whether two equations do the same to their operand."""
    same = a.primitive is b.primitive and a.params == b.params
    return same and list(map(_literal, a.invars)) == list(map(_literal, b.invars))


def _literal(atom):
    return None if is_var(atom) else np.asarray(atom.val).item()
