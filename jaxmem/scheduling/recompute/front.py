"""The Pareto front of choices: from keeping most to recomputing most.

The bytes kept, over the seconds of recomputation, are a convex curve whose corners are
cuts, each the best for some rate of bytes a second. What is kept is also written and
read: where that takes longer than recomputing it, keeping less is faster. Below them
come those that have what they keep wait in the host's memory. Segments of layers have a
front of their own: what a layer needs while it runs is another figure there.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from jaxmem.chips import is_timed, rates_of
from jaxmem.cost.equations import packing_seconds, seconds
from jaxmem.ir import primitives
from jaxmem.ir.scans import kept_size
from jaxmem.scheduling._choice import Choice, Labels
from jaxmem.scheduling._searched import LEAST, Candidate, descending
from jaxmem.scheduling.predict.tpu import is_tpu
from jaxmem.scheduling.recompute.branches import InBranches
from jaxmem.scheduling.recompute.draws import drawn_bytes
from jaxmem.scheduling.recompute.minimum_cut import (
    ShardedPrice,
    label_of,
    price_at,
    price_of,
)
from jaxmem.scheduling.recompute.pairs import Cut, Pair, cut, cut_by_names
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.recompute.space import SearchSpace
from jaxmem.scheduling.recompute.to_host import first_of, in_order
from jaxmem.scheduling.recompute.unrolled import Unrolled
from jaxmem.scheduling.recompute.unrolled_cut import (
    made_together,
    unrolled_cut,
    unrolled_price,
    with_layer_inputs,
)

# As `LEAST` for unrolled layers: each of them is another step between two candidates.
_APART = 0.01
_LOWEST = 1e-3  # bytes a second: everything that can be is recomputed
_HIGHEST = 1e15  # bytes a second: what takes the fewest seconds is recomputed
_BESIDE = 16  # operations that are looked at beside each corner: layers have as many
_SMALL = 1 / 64  # of what a layer keeps: not worth a copy of its own
# What layers take, in terms of the estimate of their equations: 1.4 and 1.8 in a
# compiled Llama, whose elementwise operations that estimate has as fused.
_PACE = 1.5
# Of how many layers one keeps its input: of all, or of a transformer's blocks, each of
# which has two.
_EVERY = (1, 2)
_STEP = 8.0  # from one rate to the next that is looked at


def pareto_front(space: SearchSpace) -> list[Candidate]:
    """The corners, the fewest seconds first."""
    if not space.is_unrolled:
        return _corners(space)
    spaces = [space, *_with_layer_inputs(space)]
    found = [_when_there(one, c) for one in spaces for c in _corners(one)]
    if len(spaces) == 1:
        return found
    return descending(_fewest([], found), _APART * found[0].bytes)


def _with_layer_inputs(space: SearchSpace) -> Iterator[SearchSpace]:
    """The space where the inputs of all its layers, or of some, are kept."""
    for every in _EVERY:
        lists = [with_layer_inputs(pair, every) for pair in space.unrolled]
        if lists == space.unrolled:
            return
        yield replace(space, unrolled=lists, layer_inputs=every)


def _corners(space: SearchSpace) -> list[Candidate]:
    first, free = _candidate(space, None), _candidate(space, math.inf)
    if free.seconds > 0:  # it packs masks: to draw them once more may be faster
        free = min(free, _candidate(space, _HIGHEST), key=lambda one: one.seconds)
    lowest = _candidate(space, _lowest(space))
    least = (_APART if space.is_unrolled else LEAST) * first.bytes
    last = _cheapest(space, lowest, least)
    corners = _undominated([free, *_between(space, free, last, least), last])
    found = [first, free, corners[0], *_centred(space, corners), last]
    longer = lambda c: space.longer(c.seconds, first.bytes - c.bytes)
    found = _from_fastest([replace(c, seconds=longer(c)) for c in found])
    if space.offload:
        found = _fewest(found, [c for one in found for c in _away(space, one)])
    found = descending(found, least)
    if not (space.offload or space.named or space.is_unrolled):
        found = list(_with_others(space, found, first.bytes, least))
    if not space.offload and lowest.bytes < found[-1].bytes:
        # what keeps hardly less, for as long as more seconds are predicted: where no
        # logits are kept a softmax is computed once more, and its maxima with it
        found.append(replace(lowest, seconds=longer(lowest)))
    if is_tpu(space.target) and not space.offload:
        drawing = filter(None, (_drawing(space, one) for one in found))
        fewer = (one for one in drawing if found[-1].bytes - one.bytes > least)
        found += descending(sorted(fewer, key=lambda one: one.seconds), least)
    return found


def _drawing(space: SearchSpace, one: Candidate) -> Candidate | None:
    """A candidate without masks as arrays; None where it draws none a second time."""
    config, rates = one.choice.get(Recompute), rates_of(space.target)
    cuts = _cuts(space, config.rate, config.once)
    size = max((drawn_bytes(p.body, found.recomputed) for p, found in cuts), default=0)
    if not size:
        return None
    again = (
        pair.length * (seconds(pair.body.eqns[i], rates) or 0.0)
        for pair, found in cuts
        for i in found.recomputed
        if primitives.is_random_bits(pair.body.eqns[i])
    )
    choice = one.choice.having(replace(config, draws=True))
    return Candidate(choice, one.bytes - size, one.seconds + sum(again))


def front_with_reductions(space: SearchSpace) -> list[Candidate]:
    """The front with sums recomputed; empty where that makes nothing else of it.

    Of equations outside of loops XLA does that as it likes, and names say what is kept.
    """
    if space.is_unrolled or space.named or not is_timed(space.target):
        return []
    other = replace(space, reductions=True)
    front = pareto_front(other)
    rate = front[0].choice.get(Recompute).rate
    again = (p.body.eqns[i] for p, c in _cuts(other, rate) for i in c.recomputed)
    return front if any(map(primitives.is_reduction, again)) else []


def all_kept(space: SearchSpace) -> int:
    """Bytes of what is kept where nothing is recomputed."""
    return _candidate(space, None).bytes


def _lowest(space: SearchSpace) -> float:
    """The rate below which nothing is recomputed, since sending it away is faster."""
    if not math.isinf(space.offload):  # nothing is sent, or not all may be
        return _LOWEST
    rate = rates_of(space.target).host / 2  # there and back
    # the link is busy: it is faster to recompute until it is done
    while _LOWEST < rate and _candidate(space, rate / _STEP).seconds < space.waiting:
        rate /= _STEP
    return rate


def _cheapest(space: SearchSpace, candidate: Candidate, least: float) -> Candidate:
    """The candidate of the highest rate that keeps hardly more than this one."""
    # A softmax's maxima and sums are such: few bytes, and dear, since all logits must
    # be there to recompute them.
    best = candidate
    while best.seconds > 0:
        rate = _STEP * (best.choice.get(Recompute).rate or 0.0)
        following = _candidate(space, rate)
        if following.bytes - candidate.bytes > least:
            break
        best = following
    return best


def _undominated(corners: Sequence[Candidate]) -> list[Candidate]:
    """Without those that keep more than another which takes no more seconds."""
    # What is recomputed at no rate may cost nothing by the estimate of seconds: a call
    # of an activation, of which that estimate looks at the body.
    found: list[Candidate] = []
    for corner in corners:  # each keeps less than the one before
        while found and corner.seconds <= found[-1].seconds:
            found.pop()
        found.append(corner)
    return found


def _from_fastest(candidates: list[Candidate]) -> list[Candidate]:
    """Without those that keep more and take longer, since what is kept is moved."""
    fastest = min(candidates, key=lambda one: one.seconds)
    return candidates[candidates.index(fastest) :]


def _fewest(kept: list[Candidate], sent: list[Candidate]) -> list[Candidate]:
    """All of the first, and those of the others that keep less in as few seconds."""
    found, rest = list(kept), sorted(sent, key=lambda one: (one.seconds, one.bytes))
    for one in rest:
        if all(one.bytes < c.bytes for c in found if c.seconds <= one.seconds):
            found.append(one)
    return sorted(found, key=lambda one: (one.seconds, -one.bytes))


def _between(
    space: SearchSpace, rich: Candidate, poor: Candidate, least: float
) -> Iterator[Candidate]:
    if rich.bytes - poor.bytes <= least or poor.seconds <= rich.seconds:
        return
    rate = (rich.bytes - poor.bytes) / (poor.seconds - rich.seconds)
    candidate = _candidate(space, rate)
    if min(rich.bytes - candidate.bytes, candidate.bytes - poor.bytes) > least:
        yield from _between(space, rich, candidate, least)
        yield candidate
        yield from _between(space, candidate, poor, least)


def _centred(space: SearchSpace, corners: Sequence[Candidate]) -> Iterator[Candidate]:
    """All corners but the ends, at rates halfway between those of their neighbours."""
    # Each is the best between two rates, those at which it is worth as much as its
    # neighbours. Near one of them, rounding would decide what is recomputed.
    if len(corners) < 3:  # two ends, which may be the same
        return
    pairs = itertools.pairwise(corners)
    rates = [(a.bytes - b.bytes) / (b.seconds - a.seconds) for a, b in pairs]
    for high, low in itertools.pairwise(rates):
        yield _candidate(space, (high + low) / 2)


def _with_others(
    space: SearchSpace, corners: Sequence[Candidate], whole: int, least: float
) -> Iterator[Candidate]:
    """The corners, and what lies between two of them and takes as few seconds.

    No rate tells these apart, since each of them is the best for none; but a budget is
    no rate. They recompute what the first of the two does and one operation more, or
    what the second does but for one.
    """
    made = [_operations(space, one.choice.get(Recompute)) for one in corners]

    def recomputing(one: frozenset[str]) -> Candidate:
        at = next(i for i, every in enumerate(made) if one <= every)
        once = tuple(sorted(made[at] - one))
        other = _candidate(space, corners[at].choice.get(Recompute).rate, once)
        took = space.longer(other.seconds, whole - other.bytes)
        return replace(other, seconds=took)

    def between(k: int, sets: Iterable[frozenset[str]]) -> Iterator[Candidate]:
        ends = corners[k].seconds, corners[k + 1].seconds
        found = map(recomputing, dict.fromkeys(one for one in sets if one not in made))
        return (one for one in found if ends[0] < one.seconds < ends[1])

    for k, (rich, poor) in enumerate(itertools.pairwise(corners)):
        yield rich
        found = [*between(k, _one_apart(made, k))]
        inside = _descending_from(rich, found, least)
        own = [_operations(space, one.choice.get(Recompute)) for one in inside]
        found += between(k, (one for o in own for one in _one_more(made, k, o)))
        inside = _descending_from(rich, found, least)
        yield from (one for one in inside if one.bytes - poor.bytes > least)
    yield corners[-1]


def _one_apart(made: Sequence[frozenset[str]], k: int) -> list[frozenset[str]]:
    """What a corner recomputes and one operation more, the next one and one less."""
    below = [made[k + 1] - {label} for label in sorted(made[k + 1])[:_BESIDE]]
    return [*_one_more(made, k, made[k]), *below]


def _one_more(
    made: Sequence[frozenset[str]], k: int, own: frozenset[str]
) -> list[frozenset[str]]:
    """What is recomputed and one operation more, of those of later corners."""
    later = (label for every in made[k + 1 :] for label in sorted(every))
    more = [label for label in dict.fromkeys(later) if label not in own]
    return [own | {label} for label in more[:_BESIDE]]


def _descending_from(
    first: Candidate, found: Iterable[Candidate], least: float
) -> list[Candidate]:
    """Those that keep less than the first, each less than the one before."""
    found = sorted(found, key=lambda one: (one.seconds, one.bytes))
    return descending([first, *found], least)[1:]


def _operations(space: SearchSpace, config: Recompute) -> frozenset[str]:
    """Labels of what is recomputed and costs something."""
    cuts = _cuts(space, config.rate, config.once)
    again = ((pair, pair.body.eqns[i]) for pair, own in cuts for i in own.recomputed)
    return frozenset(label_of(eqn) for pair, eqn in again if pair.is_paid(eqn))


def _away(space: SearchSpace, candidate: Candidate) -> Iterator[Candidate]:
    """A candidate with more and more of it in the host's memory, the first first."""
    config = candidate.choice.get(Recompute)
    cuts = _cuts(space, config.rate)
    least = max(1, round(_SMALL * max((found.bytes for _, found in cuts), default=0)))
    orders = [in_order(pair, found.variables, space.target) for pair, found in cuts]
    sizes = (map(kept_size, order.variables) for order in orders)
    large = ([n for n in one if n >= least] for one in sizes)
    sums = map(itertools.accumulate, large)
    layers = [_layer_seconds(space, *one) for one in cuts]
    for most in sorted(set(itertools.chain.from_iterable(sums))):
        sent = replace(config, offload=least, offload_most=most)
        gone, waited = 0.0, 0.0
        for (pair, _), order, took in zip(cuts, orders, layers, strict=True):
            away = first_of(pair, order, least, most)
            row = sum(kept_size(v) / pair.shards(v) for v in away.variables)
            gone += pair.length * row
            waited += pair.length * _waited(space, took, row)
        if gone > space.offload:
            return
        choice, kept = candidate.choice.having(sent), candidate.bytes - round(gone)
        # the copies themselves read the device's memory, and write it
        took = waited + space.moved(round(gone))
        yield Candidate(choice, kept, candidate.seconds + took)


def _layer_seconds(space: SearchSpace, pair: Pair, found: Cut) -> tuple[float, float]:
    """What a layer computes in the forward pass, and with a cut in the backward one."""
    one = pair.priced(price_at(1.0, space.target))
    again = sum(price_of(pair.body, i, one) or 0.0 for i in found.recomputed)
    forward, backward = pair.layer_seconds(rates_of(space.target))
    return forward, backward + again


def _waited(space: SearchSpace, layer: tuple[float, float], row: float) -> float:
    """Seconds that a layer waits for so many of its bytes, on the way there and back.

    They go while a layer is computed, in either pass.
    """
    link = row / rates_of(space.target).host
    if space.waiting:  # moments have the link for as long as the layers run
        return 2 * link
    return sum(max(0.0, link - _PACE * took) for took in layer)


def _cuts(
    space: SearchSpace, rate: float | None, once: Labels = ()
) -> list[tuple[Pair, Cut]]:
    price = price_at(rate, space.target, space.reductions, once)
    cut_of = cut_by_names if space.named else cut
    return [(pair, cut_of(pair, price)) for pair in space.scans]


def _recompute(space: SearchSpace, rate: float | None, once: Labels) -> Recompute:
    reductions = space.reductions and rate is not None
    return Recompute(rate, space.named, reductions=reductions, once=once)


def _when_there(space: SearchSpace, one: Candidate) -> Candidate:
    """With the bytes of a layer that is recomputed, while its arrays are there.

    In a scan those of one layer are there anyway.
    """
    rate = one.choice.get(Unrolled).rate
    if rate is None:
        return one
    about = rate, space.target, space.reductions
    cuts = ((pair, unrolled_cut(pair, *about)) for pair in space.unrolled)
    there = (p.kept_on_device(v) for p, found in cuts for v in made_together(p, found))
    return replace(one, bytes=one.bytes + round(max(there, default=0.0)))


def _candidate(space: SearchSpace, rate: float | None, once: Labels = ()) -> Candidate:
    price, one = (price_at(r, space.target, space.reductions) for r in (rate, 1.0))
    scans, rates = _cuts(space, rate, once), rates_of(space.target)
    cuts = [(pair, found, one) for pair, found in scans]
    cuts += [(pair, cut(pair, price), one) for pair in space.branches]
    if rate is not None:
        cuts += _unrolled_cuts(space, rate)
    kept = sum(p.length * p.kept_on_device(found.variables) for p, found, _ in cuts)
    kept += sum(pair.bytes for pair in space.unrolled) if rate is None else 0
    kept += sum(p.kept_on_device(p.layer_inputs) for p in space.unrolled)
    times = (
        pair.length * (price_of(pair.body, i, pair.priced(seconds)) or 0.0)
        for pair, found, seconds in cuts
        for i in found.recomputed
    )
    packing = (
        pair.length * packing_seconds(v, rates, pair.inside())
        for pair, found in scans
        for v in found.variables
    )
    choice = Choice(space.target, (_recompute(space, rate, once),))
    if space.is_unrolled:
        own = Unrolled(rate, space.reductions, space.layer_inputs)
        choice = choice.having(Unrolled() if rate is None else own)
    if space.branches:
        choice = choice.having(InBranches(rate))
    return Candidate(choice, round(kept), sum(times) + sum(packing))


def _unrolled_cuts(
    space: SearchSpace, rate: float
) -> Iterator[tuple[Pair, Cut, ShardedPrice]]:
    """Lists outside of loops, their cuts, and the seconds of their equations."""
    about = space.target, space.reductions
    for pair in space.unrolled:
        seconds = unrolled_price(pair, 1.0, *about)
        yield pair, unrolled_cut(pair, rate, *about), seconds
