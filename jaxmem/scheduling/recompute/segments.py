"""Segments of layers, of which only the first layer keeps its input: the analysis.

L layers in segments of S keep the inputs of L / S layers and what S layers keep, for
one more forward pass less a segment (Chen et al. 2016, section 4.1). A segment may have
segments of its own of T layers, which keep L / S inputs, S / T of them and what T
layers keep, for up to two forward passes more (section 4.4).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from jaxmem.chips import rates_of
from jaxmem.cost.equations import seconds
from jaxmem.ir.scans import is_var
from jaxmem.ir.shards import InputShardings
from jaxmem.scheduling.recompute.minimum_cut import ShardedPrice, needed
from jaxmem.scheduling.recompute.pair_rewrite import PairRewrite, stacked
from jaxmem.scheduling.recompute.pairs import Cut, Pair, cut, pairs
from jaxmem.scheduling.recompute.to_host import Offloaded

Sizes = tuple[int, ...]  # layers in a segment, in one of those inside of it, ...


@dataclass(frozen=True)
class Segments:
    """A pair of scans, and the segments in which the second repeats the first."""

    layer: PairRewrite  # what a layer keeps, and what it recomputes of that
    # layers in a segment, and in one of the segments inside of it, which divide it; the
    # first segment of all has what is left
    sizes: Sizes
    # numbers of the carries that the first layer of a segment keeps
    carried: tuple[int, ...]
    replayed: tuple[Any, ...]  # equations of the forward body that a segment repeats

    @property
    def pair(self) -> Pair:
        return self.layer.pair

    @property
    def offloaded_bytes(self) -> int:
        return self.layer.offloaded_bytes

    @property
    def whole(self) -> tuple[int, ...]:
        """Layers in what the segments of each size are segments of."""
        return (self.pair.length, *self.sizes[:-1])

    @property
    def counts(self) -> tuple[int, ...]:
        """How many segments of each size there are at a time."""
        parts = zip(self.whole, self.sizes, strict=True)
        return tuple(-(-whole // size) for whole, size in parts)

    @property
    def starts(self) -> list[Any]:
        """Variables of the forward body that the first layer of a segment keeps."""
        early = carries(self.pair)
        return [early[k] for k in self.carried]

    @property
    def bytes(self) -> int:
        """What is kept at one time, on one device."""
        return int(self._starts + self.sizes[-1] * self._of_a_layer)

    @property
    def moved_bytes(self) -> int:
        """What is written and read, on one device: all layers keep theirs in turn."""
        return int(self._starts + self.pair.length * self._of_a_layer)

    @property
    def _starts(self) -> float:
        return sum(self.counts) * self.pair.kept_on_device(self.starts)

    @property
    def _of_a_layer(self) -> float:
        return self.pair.kept_on_device(self.layer.instead)

    @property
    def layers(self) -> int:
        """How many layers are run a second time."""
        # All, once for each size, but those of the last segments: what they keep is
        # there when the forward pass, or the segment that they end, has been run.
        length, count = self.pair.length, 0
        for whole, size in zip(self.whole, self.sizes, strict=True):
            count += length - length // whole * size - min(length % whole, size)
        return count

    @property
    def recomputed(self) -> list[tuple[Any, int]]:
        """(equation, how often) of what is recomputed and costs something."""
        return [*self.layer.recomputed, *((e, self.layers) for e in self.paid)]

    @property
    def paid(self) -> list[Any]:
        """Equations that cost something, of a layer that is run a second time."""
        return [e for e in self.replayed if self.pair.is_paid(e)]

    def described(self) -> Iterator[tuple[Any, Any, str, int, int]]:
        """(aval, equation, words, 1, shards) of stacks saved; -1: kept instead."""
        shards = self.pair.shards
        for slot, v in self.layer.slots.items():
            words = "of the segment's first layer; its layers are run a second time"
            yield self.pair.stacks[slot].aval, self.layer.maker(v), words, 1, shards(v)
        for v in self.starts:
            aval, words = stacked(v, sum(self.counts)), "of a segment's first layer"
            yield aval, None, words, -1, shards(v)
        for v in self.layer.instead:
            words = "of the layers of one segment"
            aval = stacked(v, self.sizes[-1])
            yield aval, self.layer.maker(v), words, -1, shards(v)


def of_every_size(pair: Pair, found: Cut) -> Iterator[Segments]:
    """The segments of a pair whose layers keep `found`, where they save something."""
    # None where the cost of an equation is not known.
    return _of_sizes(pair, found, _sizes(pair.length))


def _of_sizes(pair: Pair, found: Cut, among: Iterable[Sizes]) -> Iterator[Segments]:
    if (some := _in_one(pair, found)) is None:
        return
    for sizes in among:
        plan = replace(some, sizes=sizes)
        if plan.bytes < pair.length * found.bytes:
            yield plan


def segmented(
    closed, price: ShardedPrice, sizes: Sizes, given: InputShardings | None = None
) -> Iterator[Segments]:
    """The pairs of scans of which less is kept in segments of these sizes."""
    for pair in pairs(closed, given):
        if sizes[0] < pair.length:
            yield from _of_sizes(pair, cut(pair, price, loop_carried=False), [sizes])


def _sizes(length: int) -> Iterator[Sizes]:
    """What segments may have: any size, and one inside of them that divides it."""
    inner = range(2, length)
    yield from ((size,) for size in inner)
    # it divides the outer one, so that all segments inside are alike
    for size in inner:
        yield from ((whole, size) for whole in range(2 * size, length, size))


def _in_one(pair: Pair, found: Cut) -> Segments | None:
    kept = found.variables
    own = dict(pair.slots), (), pair.fixed, kept, Offloaded(), pair.length
    carried = _carried(pair, kept)
    replayed = _replayed_by(pair, kept, carried)
    known = all(seconds(e, rates_of("cpu")) is not None for e in replayed)
    if not carried or not known or found.loop_carried:
        return None
    return Segments(PairRewrite(pair, *own), (pair.length,), carried, replayed)


def carries(pair: Pair) -> list[Any]:
    """The carries of the forward body, as they come in."""
    return [v for v in pair.body.arguments if v not in pair.inputs]


def _carried(pair: Pair, kept) -> tuple[int, ...]:
    """Which carries a layer needs to make `kept`, of itself and of those after it."""
    body, early = pair.body, carries(pair)
    # a carry may be made of others, and these of others: until none is added
    found: set[int] = set()
    while True:
        ends = [body.outvars[k] for k in found]
        eqns = body.cone(filter(is_var, [*kept, *ends]))
        read = {v for i in eqns for v in body.eqns[i].invars if is_var(v)}
        read |= {v for v in [*kept, *ends] if is_var(v)}
        more = {k for k, v in enumerate(early) if v in read}
        if more <= found:
            return tuple(sorted(found))
        found |= more


def _replayed_by(pair: Pair, kept, carried: tuple[int, ...]) -> tuple[Any, ...]:
    """The equations that make what a layer keeps, and the next input, of its input."""
    body = pair.body
    known = {*body.constants, *body.arguments}
    wanted = filter(is_var, [*kept, *(body.outvars[k] for k in carried)])
    return tuple(body.eqns[i] for i in needed(body, wanted, known))
