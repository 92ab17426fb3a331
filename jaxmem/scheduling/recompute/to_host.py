"""Which residuals of a pair of scans wait in the host's memory, and when they go there.

XLA copies beside what an iteration computes, and ends a copy where the array's place in
memory is needed again: one that is handed to the next iteration is overwritten where
that makes its own. So a residual of the first half of a layer is sent beside the rest
of its layer, and one of the second half beside the next layer's first half.
"""

import itertools
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
      variables: those.
      later: those of them that are sent beside the next layer.
    """

    variables: frozenset[Any] = frozenset()
    later: frozenset[Any] = frozenset()


def sent_away(
    pair: Pair,
    kept: Iterable[Any],
    least: Bytes | None,
    most: Bytes | None,
    target: str,
) -> Offloaded:
    """What of the variables that are kept is offloaded to the host.

    Args:
      pair: the scans.
      kept: variables of the forward body.
      least: bytes of a layer from which one may; None: none may.
      most: bytes of a layer that wait there at most; None: as many as there are.
      target: the chip.
    """
    if least is None:
        return Offloaded()
    large = in_order(pair, (v for v in kept if kept_size(v) >= least), target)
    if most is None:
        return _offloaded(pair, large, target)
    # another of the pair's rewrites may have sent some already
    there = filter(is_var, pair.body.outvars)
    sent, room = [], most - sum(map(host_bytes, there))
    for v in large:
        if kept_size(v) <= room:
            room -= kept_size(v)
            sent.append(v)
    return _offloaded(pair, sent, target)


def in_order(pair: Pair, variables: Iterable[Any], target: str) -> list[Any]:
    """Variables of the forward body in the order in which they go to the host."""
    found = sorted(variables, key=lambda v: pair.body.maker.get(v, -1))
    if is_gpu(target):
        # what has most of a layer to run beside on its way
        beside = _beside(pair, target)
        return sorted(found, key=lambda v: max(beside[v]), reverse=True)
    # XLA for TPUs sends it beside all of the next layer: small arrays stay, as what is
    # left of a budget allows
    return sorted(found, key=kept_size, reverse=True)


def _offloaded(pair: Pair, variables: Iterable[Any], target: str) -> Offloaded:
    sent = frozenset(variables)
    if not is_gpu(target):
        return Offloaded(sent)
    beside = _beside(pair, target)
    return Offloaded(sent, frozenset(v for v in sent if beside[v][0] > beside[v][1]))


def _beside(pair: Pair, target: str) -> dict[Any, tuple[float, float]]:
    """Seconds of a layer before each variable is there, and after."""
    rates, inside = rates_of(target), pair.inside()
    took = (seconds(eqn, rates, inside) or 0.0 for eqn in pair.body.eqns)
    ends = list(itertools.accumulate(took, initial=0.0))
    made = {v: ends[i + 1] for v, i in pair.body.maker.items()}
    given = dict.fromkeys(filter(is_var, pair.body.arguments), 0.0)
    return {v: (then, ends[-1] - then) for v, then in (given | made).items()}
