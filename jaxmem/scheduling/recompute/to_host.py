"""Which residuals of a pair of scans wait in the host's memory, and when they go there.

XLA copies beside what an iteration computes, and ends a copy where the array's place in
memory is needed again: one that is handed to the next iteration is overwritten where
that makes its own. So a residual of the first half of a layer is sent beside the rest
of its layer, and one of the second half beside the next layer's first half.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxmem.chips import is_gpu, rates_of
from jaxmem.cost.equations import seconds
from jaxmem.ir.scans import host_bytes, is_var, kept_size
from jaxmem.scheduling._choice import Bytes
from jaxmem.scheduling.recompute.pairs import Pair


@dataclass(frozen=True)
class Offloaded:
    """Variables of a forward body that are offloaded to the host.

    Attributes:
      variables: those, in the order in which they are chosen.
      later: those of them that are sent beside the next layer.
    """

    variables: tuple[Any, ...] = ()
    later: frozenset[Any] = frozenset()


def in_order(pair: Pair, variables: Iterable[Any], target: str) -> Offloaded:
    """All of these variables, those first that had better be offloaded."""
    found = sorted(variables, key=lambda v: pair.body.maker.get(v, -1))
    if not is_gpu(target):
        # XLA for TPUs sends it beside all of the next layer: small arrays stay, as what
        # is left of a budget allows
        return Offloaded(tuple(sorted(found, key=kept_size, reverse=True)))
    beside = _beside(pair, target)
    # what has most of a layer to run beside on its way
    found.sort(key=lambda v: max(beside[v]), reverse=True)
    later = (v for v in found if beside[v][0] > beside[v][1])
    return Offloaded(tuple(found), frozenset(later))


def first_of(
    pair: Pair, order: Offloaded, least: Bytes, most: Bytes | None
) -> Offloaded:
    """The first of an order, as far as there is room.

    Args:
      pair: the scans.
      order: made by `in_order`.
      least: bytes of a layer from which a variable may be offloaded.
      most: bytes of a layer that are offloaded at most; None: as many as there are.
    """
    # another of the pair's rewrites may have sent some already
    there = filter(is_var, pair.body.outvars)
    room = math.inf if most is None else most - sum(map(host_bytes, there))
    sent = []
    for v in order.variables:
        if least <= kept_size(v) <= room:
            room -= kept_size(v)
            sent.append(v)
    return Offloaded(tuple(sent), order.later.intersection(sent))


def _beside(pair: Pair, target: str) -> dict[Any, tuple[float, float]]:
    """Seconds of a layer before each variable is there, and after."""
    rates, inside = rates_of(target), pair.inside()
    took = (seconds(eqn, rates, inside) or 0.0 for eqn in pair.body.eqns)
    ends = list(itertools.accumulate(took, initial=0.0))
    made = {v: ends[i + 1] for v, i in pair.body.maker.items()}
    given = dict.fromkeys(filter(is_var, pair.body.arguments), 0.0)
    return {v: (then, ends[-1] - then) for v, then in (given | made).items()}
