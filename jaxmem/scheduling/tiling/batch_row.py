"""A step in micro-batches as a row of the plan: its bytes, and what it costs.

The cost is by the price of all parts (`cost.parts`), over the equations of the step and
of the loops in it: weights are read by every part, the float32 sums of gradients are
read and written by each, and every kernel is started `n` times.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmem.cost.live_bytes import LiveBytes
from jaxmem.cost.parts import Price, summed_size
from jaxmem.ir import jaxprs
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.placements import Placements, Shard
from jaxmem.ir.placements.propagate import Propagation
from jaxmem.ir.scans import iterations, size_of
from jaxmem.ir.shard_labels import inner_shardings
from jaxmem.ir.shards import Shardings
from jaxmem.scheduling.plan.rows import WHOLE_STEP, TiledRegion
from jaxmem.scheduling.tiling.batch import Batch


def row_of(batch: Batch, target: str) -> TiledRegion:
    """The row of a step whose examples run in parts."""
    largest = max(made_in_parts(batch), key=size_of)
    before, after = held(batch)
    return TiledRegion(
        largest.aval.shape,
        str(largest.aval.dtype),
        WHOLE_STEP,
        "",
        "batch",
        batch.n,
        before,
        after,
        1,
        _seconds(batch, target),
    )


def held(batch: Batch) -> tuple[int, int]:
    """Bytes that a step has made and holds at its peak: as it is, and in parts.

    Both are of one device.
    """
    graph, shardings = batch.graph, batch.shardings
    live = LiveBytes(graph, shardings)
    before = live.whole + _inside(graph.eqns, Propagation(), 1, shardings)
    sums, cut = batch.frontier()
    # those that lie there whole, from the first part on; of what is added up each
    # device has all that the others' examples would add to
    own = lambda v: batch.shardings.shards(v, without=batch.names)
    kept = {v: summed_size(v) / own(v) for v in sums}
    kept |= {v: float(shardings.bytes_of(v)) for v in cut}
    sizes = _sizes(live, batch, batch.n)
    after = live.profile({v: s for v, s in sizes.items() if v not in kept})
    after += _inside(graph.eqns, batch, batch.n, shardings)
    first = min(batch.placed)
    for v, size in kept.items():
        after[first : live.death[v]] += size
    return int(before.max()), int(after.max())


def _sizes(live: LiveBytes, known: Propagation, n: int) -> dict[Any, float]:
    """Bytes of what a list makes, for one part."""
    parts = lambda v: n if isinstance(known.at(v), Shard) else 1
    return {v: size / parts(v) for v, size in live.sizes.items()}


def _inside(eqns: Sequence[Any], known: Propagation, n: int, shardings: Shardings):
    """Of each equation of a list, the bytes that its bodies hold at their peak."""
    found = (
        _of_bodies(eqn, known.placed.get(i), n, shardings) for i, eqn in enumerate(eqns)
    )
    return np.fromiter(found, float, len(eqns))


def _of_bodies(eqn, found: Placements | None, n: int, shardings: Shardings) -> float:
    inner = [(body.closed, body) for body in found.inner] if found else []
    inner = inner or [(body, Propagation()) for body in jaxprs.bodies(eqn)]
    inside = lambda body: inner_shardings(eqn, body, shardings)
    return max((_most(*one, n, inside(one[0])) for one in inner), default=0.0)


def _most(closed, known: Propagation, n: int, shardings: Shardings) -> float:
    """The peak of a body for one part."""
    graph = JaxprGraph(closed)
    live = LiveBytes(graph, shardings)
    profile = live.profile(_sizes(live, known, n))
    return (profile + _inside(graph.eqns, known, n, shardings)).max(initial=0.0)


def made_in_parts(batch: Batch) -> Iterator[Any]:
    """Variables of which a part at a time is there, those of bodies too."""
    _, kept = batch.frontier()
    yield from (v for v in _cut(batch.graph.eqns, batch) if v not in kept)


def _cut(eqns: Sequence[Any], known: Propagation) -> Iterator[Any]:
    for i, found in known.placed.items():
        yield from (v for v in eqns[i].outvars if isinstance(known.at(v), Shard))
        for body in found.inner:
            yield from _cut(body.jaxpr.eqns, body)


class _Both(NamedTuple):
    """Of the whole batch, and of one part of it."""

    whole: float = 0.0
    part: float = 0.0

    def times(self, count: int) -> "_Both":
        return _Both(count * self.whole, count * self.part)


def _seconds(batch: Batch, target: str) -> float:
    """What a step takes longer in the parts of its batch, on a chip.

    Args:
      batch: what of the step runs in parts.
      target: the chip's name, one of `jaxmem.targets()`.

    Returns:
      Seconds of one device, 0.0 where the parts cost nothing by the roofline.
    """
    at = sorted(batch.placed.keys() | batch.in_part())
    eqns = [batch.graph.eqns[i] for i in at]
    placements = {k: batch.placed[i] for k, i in enumerate(at) if i in batch.placed}
    price = Price(target, batch.shardings)
    both = _of_list(eqns, placements, batch.n, price)
    return price.longer(both.whole, [both.part], batch.n)


def _of_list(
    eqns: Iterable[Any], placements: Mapping[int, Placements], n: int, price: Price
) -> _Both:
    found = [_of(eqn, placements.get(i), n, price) for i, eqn in enumerate(eqns)]
    return _Both(*(sum(seconds) for seconds in zip(*found, strict=True)))


def _of(eqn, found: Placements | None, n: int, price: Price) -> _Both:
    if found is None:
        return _Both(*[price.seconds(eqn)] * 2)
    if found.inner:
        # one branch of a `cond` is taken, and nobody knows which
        most = max(_of_body(eqn, body, n, price) for body in found.inner)
        return most.times(iterations(eqn))
    if not any(isinstance(p, Shard) for p in found.ins + found.outs):
        n = 1  # on terms of sums: each part does it with whole arrays
    return _Both(price.whole(eqn), price.part(eqn, found, n))


def _of_body(eqn, body, n: int, price: Price) -> _Both:
    inside = Price(price.target, inner_shardings(eqn, body.closed, price.shardings))
    return _of_list(body.jaxpr.eqns, body.placed, n, inside)
