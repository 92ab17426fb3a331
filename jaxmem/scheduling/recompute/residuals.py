"""Residuals of a forward scan that the backward scan recomputes where they are read.

They are elementwise, or a move, of other residuals, of inputs of the forward scan or of
something smaller; or the next layer's input, which the backward scan has just read.
Unless a rate asks for more, no matmul, reduction or random bit is computed twice.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.propagation import shardings_in
from jaxmem.ir.scans import is_mask, is_var, run_body, scan_like, split
from jaxmem.ir.shard_labels import inner_shardings
from jaxmem.ir.shards import InputShardings, Shardings, held
from jaxmem.memory import format_bytes
from jaxmem.scheduling._choice import Bytes, Labels, Rate
from jaxmem.scheduling._pass import NAME_A_TARGET, Level
from jaxmem.scheduling.plan.rows import nbytes
from jaxmem.scheduling.predict.tpu import is_tpu
from jaxmem.scheduling.recompute.draws import is_of_draws, values_of
from jaxmem.scheduling.recompute.minimum_cut import FusedAlone, ShardedPrice, price_at
from jaxmem.scheduling.recompute.pair_rewrite import (
    Given,
    PairRewrite,
    packed,
    rebuilt,
    unpacked,
)
from jaxmem.scheduling.recompute.pairs import Cut, Pair, cut, cut_by_names, pairs
from jaxmem.scheduling.recompute.to_host import Offloaded, first_of, in_order


@dataclass(frozen=True)
class Recompute:
    """What the backward scans recompute."""

    name: ClassVar[str] = "recompute"
    # bytes that one would rather keep than compute for a second: the lower, the more is
    # recomputed. At infinity, and with None, only what costs nothing
    rate: Rate | None = None
    named: bool = False  # whether only what has a `checkpoint_name` is kept
    # bytes a layer from which what is kept waits in the host's memory; None: nothing
    # does
    offload: Bytes | None = None
    # whether sums and maxima of what is recomputed are recomputed, too, few bytes as
    # they are: XLA has one kernel for a softmax as it is written, and none for one
    # whose sums are given. Only compiling tells which takes longer
    reductions: bool = False
    # bytes of a layer that wait there at most, what is computed first before the rest;
    # None: as many as there are
    offload_most: Bytes | None = None
    once: Labels = ()  # operations that are not recomputed, whatever the rate
    # whether a mask that is drawn once more is drawn in all that reads it (`draws.py`)
    draws: bool = False

    def price(self, target: str) -> ShardedPrice:
        """What one would pay, in bytes, for not recomputing an equation."""
        return price_at(self.rate, target, self.reductions, self.once)

    @property
    def uses_host(self) -> bool:
        """Whether arrays may be offloaded to the host: not every platform can."""
        return self.offload is not None


def rewrites_of(level: Level, config: Recompute) -> Iterator[PairRewrite]:
    """The pairs of scans in which something can be saved at the price there is."""
    price = config.price(level.target)
    if config.named:
        return rewrites_by_names(level.jaxpr, price, level.shardings)
    return rewrites(level.jaxpr, price, config, level.shardings, level.target)


def rewrites(
    closed,
    price: ShardedPrice = FusedAlone(),  # noqa: B008 - it has no state
    config: Recompute = Recompute(),  # noqa: B008 - it is frozen
    given: InputShardings | None = None,
    target: str = "cpu",
) -> Iterator[PairRewrite]:
    """The pairs of scans in which something can be saved, at `price` or less."""
    for pair in pairs(closed, given):
        found = cut(pair, price)
        away = _offloaded(pair, found, config, target)
        once = is_tpu(target) and not config.draws
        rewrite = rewrite_of(pair, found, pair.length, away, once)
        # what is sent to the host frees the device even where as much is kept
        if found.cost < pair.bytes or rewrite.sent:
            yield rewrite


def _offloaded(pair: Pair, found: Cut, config: Recompute, target: str) -> Offloaded:
    """What of a cut is offloaded to the host."""
    if config.offload is None:
        return Offloaded()
    order = in_order(pair, found.variables, target)
    return first_of(pair, order, config.offload, config.offload_most)


def rewrites_by_names(
    closed, price: ShardedPrice, given: InputShardings | None = None
) -> Iterator[PairRewrite]:
    """The pairs of scans in which something is kept that has no name."""
    for pair in pairs(closed, given):
        rewrite = rewrite_of(pair, cut_by_names(pair, price), pair.length)
        if rewrite.slots:
            yield rewrite


def rewrite_of(
    pair: Pair,
    found: Cut,
    layers: int,
    away: Offloaded = Offloaded(),  # noqa: B008 - it is frozen
    once: bool = False,
) -> PairRewrite:
    """What is recomputed in the first layers of a pair, where this is kept.

    `once`: as `PairRewrite.draws_once`.
    """
    whole = layers == pair.length
    stays = {}
    for slot, v in pair.slots.items():
        # a mask is packed into bits, and what waits on the host is sent there: neither
        # can stay in the stack that JAX made
        otherwise = (whole and is_mask(v)) or v in away.variables
        if v in found.variables and v not in stays.values() and not otherwise:
            stays[slot] = v
    slots = {slot: v for slot, v in pair.slots.items() if slot not in stays}
    instead = tuple(v for v in found.variables if v not in stays.values())
    carried = tuple(x for x in found.loop_carried if x.slot in slots)
    stays = stays | pair.fixed
    return PairRewrite(pair, slots, carried, stays, instead, away, layers, once)


class _KeptStacks(NamedTuple):
    """What a forward scan keeps instead: stacks, and what of the last layer is here."""

    stacks: dict[Any, Any]
    here: list[Any]  # of what goes to the host's memory


def with_recomputation(closed, plan: PairRewrite):
    """The jaxpr with these residuals recomputed in the backward scan."""

    def backward(eqn, ins: list, given: Given, outs: list, kept: _KeptStacks) -> list:
        before = _Before(last_of(plan, outs), kept.here)
        return _run_backward(eqn, ins, plan, given, kept.stacks, before)

    return rebuilt(closed, plan, _run_forward, backward)


def _run_forward(eqn, values: list, plan: PairRewrite) -> tuple[list, _KeptStacks]:
    """Outputs of the forward scan, and what is kept instead."""
    consts, init, xs = split(eqn, values)
    body = plan.body
    once = plan.draws_once and is_of_draws(body, plan.kept)

    def step(carry, x):
        before = dict(zip(plan.sent, carry[1], strict=True))
        inner = values_of(body, body.inputs([*consts, *carry[0], *x]), once)
        outs = inner.all_outputs()
        kept = {v: packed(v, inner.env[v]) for v in plan.instead}
        here = [kept[v] for v in plan.sent]
        now = [(before if v in plan.away.later else kept)[v] for v in plan.sent]
        kept |= zip(plan.sent, _moved(now, jax.memory.Space.Host), strict=True)
        return (outs[: len(init)], here), (outs[len(init) :], list(kept.values()))

    # the backward scan begins with the last layer's, which nobody has to fetch
    nothing = [packed(v, _compat.empty_like(v.aval)) for v in plan.sent]
    (ends, here), (ys, kept) = scan_like(eqn, step, (init, nothing), xs)
    return [*ends, *ys], _KeptStacks(dict(zip(plan.instead, kept, strict=True)), here)


def _moved(values: Sequence[Any], to: Any) -> list[Any]:
    return [jax.device_put(x, to) for x in values]


class _Before(NamedTuple):
    """What an iteration of a backward scan has of the one before."""

    inputs: list[Any]  # of the next layer
    fetched: list[Any]  # from the host's memory, for this layer


def _run_backward(
    eqn, values: list, plan: PairRewrite, given: Given, stacks: dict, first: _Before
) -> list:
    consts, init, xs = split(eqn, values)
    again = plan.evaluated
    step_back = -1 if eqn.params["reverse"] else 1
    slices = given.slices | {
        v: x for v, x in stacks.items() if v not in plan.away.variables
    }

    def step(carry, item):
        layer, inner, before = carry
        x, now = dict(item[0]), dict(zip(slices, item[1], strict=True))
        following = layer + step_back
        # of what is sent later, a layer's row is where that of the next one would be
        places = [layer if v in plan.away.later else following for v in plan.sent]
        fetched = _fetched(plan, stacks, places)
        now |= zip(plan.sent, before.fetched, strict=True)
        known = {v: x[slot] for slot, v in plan.stays.items()}
        now |= {v: unpacked(v, now[v]) for v in plan.instead}
        known = {**given.whole, **known, **now}
        values = values_of(plan.body, known, plan.draws_once)
        values.recompute(again)
        x |= {slot: values.env[v] for slot, v in plan.slots.items() if v in values.env}
        # the next layer's input: this scan has read it in the iteration before
        slots = (one.slot for one in plan.loop_carried)
        x |= dict(zip(slots, before.inputs, strict=True))
        carry, rows = run_body(eqn, consts, inner, [x[i] for i in range(len(xs))])
        before = _Before(handed_on(plan, values.env), fetched)
        return (following, carry, before), rows

    stays = {i: x for i, x in enumerate(xs) if i not in plan.slots}
    items = stays, list(slices.values())
    start = jnp.int32(plan.layers - 1 if eqn.params["reverse"] else 0)
    (_, ends, _), ys = scan_like(eqn, step, (start, init, first), items)
    return [*ends, *ys]


def _fetched(plan: PairRewrite, stacks: dict[Any, Any], places: list) -> list[Any]:
    """What waits of a layer: of one that comes next, so that no equation waits for it.

    XLA copies beside all that an iteration computes. The last iteration fetches its own
    row once more, which is dropped.
    """
    how = {"keepdims": False, "allow_negative_indices": False}
    rows = [
        lax.dynamic_index_in_dim(stacks[v], place, 0, **how)
        for v, place in zip(plan.sent, places, strict=True)
    ]
    rows = _moved(rows, jax.memory.Space.Device)
    # else XLA may spread them as the gradients of weights are, and gather what these
    # are multiplied by from all devices
    return [_as_made(plan, v, x) for v, x in zip(plan.sent, rows, strict=True)]


def _as_made(plan: PairRewrite, v: Any, x: Any) -> Any:
    """A row of a stack, sharded as the forward pass has it."""
    shardings = plan.pair.inside()
    spec = shardings.of.get(v)
    return x if spec is None or is_mask(v) else held(x, shardings.mesh, spec)


def last_of(plan: PairRewrite, outs: Sequence[Any]) -> list[Any]:
    """What comes from the iteration before, for the last layer, which has none."""
    return [_apply(x.chain, outs[x.carry]) for x in plan.loop_carried]


def handed_on(plan: PairRewrite, values: Mapping[Any, Any]) -> list[Any]:
    """The same for the layer that comes next in the backward scan."""
    return [_apply(x.eqns, values[x.source]) for x in plan.loop_carried]


def _apply(eqns: Sequence[Any], value):
    for eqn in eqns:
        (value,) = _compat.bind(
            eqn, [value if is_var(v) else v.val for v in eqn.invars]
        )
    return value


def clear_gain(level: Level, plan: PairRewrite) -> bool:
    """Whether residuals that are not kept take more than an array of one layer."""
    # The compiler's order inside the backward scan may hold one more of them at once.
    return _saved(plan) > _array_of_a_layer(level, plan)


def unclear_gains(level: Level, rewrites: Iterable[PairRewrite]) -> Iterator[str]:
    """A sentence for each pair of scans whose residuals are left as they are."""
    for plan in rewrites:
        saved, array = _saved(plan), _array_of_a_layer(level, plan)
        yield (
            f"{format_bytes(saved)} of residuals are kept that the backward scan could "
            f"recompute: in XLA's order it may then hold one more array of a layer, "
            f"{format_bytes(array)}; {NAME_A_TARGET}"
        )


def _saved(plan: PairRewrite) -> int:
    """Bytes on one device."""
    stacks = plan.described()
    return sum(sign * (nbytes(aval) // n) for aval, _, _, sign, n in stacks)


def _array_of_a_layer(level: Level, plan: PairRewrite) -> int:
    """Bytes of the largest array that the backward scan's body reads or makes."""
    eqn = JaxprGraph(level.jaxpr).eqns[plan.pair.backward]
    shardings = shardings_in(level.jaxpr, level.shardings)
    body = eqn.params["jaxpr"]
    return _largest(body, shardings_in(body, shardings.body(eqn)))


def _largest(body, shardings: Shardings) -> int:
    """The most bytes that an array of a body has on one device."""
    eqns = jaxprs.split(body)[0].eqns
    arrays = (v for eqn in eqns for v in [*eqn.invars, *eqn.outvars])
    sizes = [shardings.bytes_of(v) for v in arrays if is_var(v)]
    bodies = ((eqn, inner) for eqn in eqns for inner in jaxprs.bodies(eqn))
    sizes += (_largest(b, inner_shardings(eqn, b, shardings)) for eqn, b in bodies)
    return max(sizes, default=0)
