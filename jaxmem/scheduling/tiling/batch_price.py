"""What it costs to run a step in micro-batches: seconds beyond those of the step.

By the price of all parts (`cost.parts`), over the equations of the step and of the
loops in it: weights are read by every part, the float32 sums of gradients are read and
written by each, and every kernel is started `n` times.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxmem.cost.parts import Price
from jaxmem.ir.placements import Placements, Shard
from jaxmem.ir.scans import iterations
from jaxmem.ir.shard_labels import inner_shardings
from jaxmem.scheduling.tiling.batch import Batch


class _Both(NamedTuple):
    """Of the whole batch, and of one part of it."""

    whole: float = 0.0
    part: float = 0.0

    def times(self, count: int) -> "_Both":
        return _Both(count * self.whole, count * self.part)


def seconds(batch: Batch, target: str) -> float:
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
