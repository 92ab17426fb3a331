"""Residuals that the backward scan recomputes in the first layers only.

Between a choice that keeps much and one that recomputes much lies one for each number
of layers: the first ones do as the one, the others as the other.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from jaxmem._checks import Range
from jaxmem.chips import is_gpu, is_timed, rates_of
from jaxmem.scheduling._choice import Choice, Labels, Rate
from jaxmem.scheduling._pass import Level
from jaxmem.scheduling._searched import Between, Candidate, SearchedStep
from jaxmem.scheduling.plan.rows import Description, gathered_again
from jaxmem.scheduling.predict.tpu import is_tpu
from jaxmem.scheduling.recompute.first_layers_rewrite import (
    FirstLayersRewrite,
    kept_by,
    with_first_layers,
)
from jaxmem.scheduling.recompute.minimum_cut import (
    ShardedPrice,
    least,
    price_at,
    price_of,
)
from jaxmem.scheduling.recompute.pairs import Pair, cut, pairs
from jaxmem.scheduling.recompute.recomputation import Recomputation
from jaxmem.scheduling.recompute.residuals import Recompute, rewrite_of
from jaxmem.scheduling.recompute.segments_rewrite import InSegments
from jaxmem.scheduling.recompute.space import space_of_step
from jaxmem.scheduling.tiling.tiles import Tiles
from jaxmem.scheduling.tiling.vocabulary_tiles import VocabularyTiles


@dataclass(frozen=True)
class FirstLayers:
    """What the backward scans recompute in the first layers, and what in the others."""

    name: ClassVar[str] = "first_layers"
    # as `Recompute.rate`, of these layers; None: nothing is done here
    rate: Rate | None = None
    fraction: Annotated[float, Range(0, 1)] = 0.0  # how many of the layers these are
    others: Rate | None = None  # as `Recompute.rate`, of the other layers
    # as `Recompute.once`, of these layers and of the others
    once: Labels = ()
    others_once: Labels = ()
    # whether what all layers recompute is left where tiles can have it, so that the
    # first ones have none of it for what they do not keep: a `cond` has no tiles
    apart: bool = False
    reductions: bool = False  # as `Recompute.reductions`, of all layers


class RecomputeFirstLayers(Recomputation[FirstLayers, FirstLayersRewrite]):
    """In the first layers of a scan more is recomputed than in the others."""

    # It runs before `RecomputeResiduals`, and knows its rate (`others`): to a pair that
    # had been rewritten already, what its backward body recomputes would be dear a
    # second time.
    config = FirstLayers

    def analyse(
        self, level: Level, config: FirstLayers
    ) -> Iterator[FirstLayersRewrite]:
        if config.rate is not None:
            yield from rewrites(
                pairs(level.jaxpr, level.shardings), config, level.target
            )

    def describe(self, rewrite: FirstLayersRewrite, target: str) -> Description:
        found = super().describe(rewrite, target)
        again = rewrite.gathered if _gathers_once(target) else ()
        rows = (gathered_again(*one, rates_of(target)) for one in again)
        return replace(found, recomputed=(*found.recomputed, *rows))

    def apply(self, level: Level, rewrite: FirstLayersRewrite):
        return with_first_layers(level.jaxpr, rewrite)

    def between(
        self, step: SearchedStep, rich: Candidate, poor: Candidate
    ) -> Between | None:
        space = space_of_step(step)
        gathers = lambda one: seconds_of_gathers(space.scans, one, step.target)
        handed_out = space.moved(rich.bytes - poor.bytes)
        if is_timed(step.target):
            handed_out += space.layers * rates_of(step.target).branch
        return in_some_layers(rich, poor, space.layers, gathers, handed_out)


def in_some_layers(
    rich: Candidate,
    poor: Candidate,
    layers: int,
    gathers: Callable[[FirstLayers], float] = lambda config: 0.0,
    handed_out: float = 0.0,
) -> Between | None:
    """What lies between two candidates that differ in what layers recompute.

    Args:
      rich: what the other layers do.
      poor: what the first ones do.
      layers: of the longest scans.
      gathers: seconds in which devices gather weights once more in first layers.
      handed_out: seconds in which the `cond`s write what they read or recompute, and
        the layers read it, and in which each layer waits to know its branch.
    """
    # What waits on the host, and segments, are for all layers, and so are tiles.
    below, others = (one.choice.get(Recompute) for one in (poor, rich))
    cuts, own = (_cuts_of(one.choice) for one in (rich, poor))
    for_all = below.offload is not None or poor.choice.get(InSegments).sizes
    if layers == 1 or cuts != own or for_all or not _does_all(below, others):
        return None
    gain, apart = poor.seconds - rich.seconds, any(one != type(one)() for one in own)

    def first(n: int) -> Candidate:
        fraction = n / layers
        rates = below.rate, fraction, others.rate
        how = below.once, others.once, apart, below.reductions
        config = FirstLayers(*rates, *how)
        seconds = rich.seconds + fraction * gain + gathers(config) + handed_out
        choice = rich.choice.having(config, Recompute())
        return replace(rich, choice=choice, seconds=seconds)

    return Between(layers, first, gain - handed_out)


def _does_all(below: Recompute, others: Recompute) -> bool:
    """Whether one recomputes all that the other does, as first layers have to."""
    if below.rate is None or (others.rate is not None and below.rate > others.rate):
        return False
    return {*below.once} <= {*others.once}


def _cuts_of(choice: Choice) -> tuple[Any, ...]:
    """What of a choice says in how many parts things are done."""
    return tuple(map(choice.get, (Tiles, VocabularyTiles)))


def rewrites(
    found: Iterable[Pair], config: FirstLayers, target: str
) -> Iterator[FirstLayersRewrite]:
    """What is done to pairs of scans in which something is saved."""
    about = target, config.reductions
    price = price_at(config.rate, *about, config.once)
    others = price_at(config.others, *about, config.others_once)
    for pair in found:
        layers = round(config.fraction * pair.length)
        in_others = cut(pair, others)
        plan = rewrite_of(pair, in_others, pair.length, once=is_tpu(target))
        same = FirstLayersRewrite(plan, tuple(kept_by(plan)), 0, config.apart)
        rewrite = _kept_less(same, price, layers) if layers else None
        if rewrite is not None:
            yield rewrite
        # no layer would keep something else: then all are as the others
        elif in_others.cost < pair.bytes:
            yield same


def _gathers_once(target: str) -> bool:
    """Whether a backward pass that recomputes everything gathers weights once a layer.

    XLA for GPU does. Of that for TPU it is not known: of the steps in `benchmarks.pod`
    one sends less where the first layers alone are recomputed, two send more.
    """
    return is_gpu(target)


def seconds_of_gathers(
    found: Iterable[Pair], config: FirstLayers, target: str
) -> float:
    """How long devices send each other what is gathered once more in first layers."""
    if not _gathers_once(target):
        return 0.0
    every = (one for r in rewrites(found, config, target) for one in r.gathered)
    return sum(size * times for *_, size, times in every) / rates_of(target).link


def _kept_less(
    same: FirstLayersRewrite, price: ShardedPrice, layers: int
) -> FirstLayersRewrite | None:
    """What the first layers keep at a price; None where that is what all keep."""
    body, pair, wanted = same.body, same.pair, list(same.kept)
    # what all layers recompute is there for the first ones at no further price
    anyway = {id(body.eqns[i]) for i in same.anyway}
    priced = pair.priced(price)
    beyond = lambda eqn: 0.0 if id(eqn) in anyway else priced(eqn)
    found = least(body, wanted, pair.free, beyond, pair.inside().kept_bytes_of)
    rewrite = replace(same, kept=tuple(found), layers=layers)
    prices = (price_of(body, i, beyond) or 0.0 for i in rewrite.beyond)
    cost = pair.kept_on_device(found) + sum(prices)
    return rewrite if cost < pair.kept_on_device(wanted) else None
