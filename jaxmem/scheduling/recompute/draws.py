"""Masks that are drawn at random are made once, for all that reads them.

XLA for TPU draws random bits, 60 operations for each, in every fusion that reads them:
three times in the backward pass of an attention with dropout. Behind a barrier a mask
is an array of its own, of one layer. XLA for GPU makes one where that pays, and takes
3 % longer if it is told to.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax import lax

from jaxmem.ir import primitives
from jaxmem.ir.fused import fused_only
from jaxmem.ir.graph import JaxprGraph, Values
from jaxmem.ir.scans import is_mask, is_var, size_of


class DrawnOnce(Values):
    """Values of a layer's body, in which each such mask is behind a barrier."""

    def put(self, i: int, outs: Sequence[Any]) -> None:
        if drawn(self.graph, [i]):  # such an equation makes nothing else
            outs = lax.optimization_barrier(list(outs))
        super().put(i, outs)


def values_of(body: JaxprGraph, known: Mapping[Any, Any], once: bool) -> Values:
    """The values of a layer's body; `once`: masks are made once."""
    return (DrawnOnce if once else Values)(body, dict(known))


def drawn(body: JaxprGraph, positions: Iterable[int]) -> list[Any]:
    """The masks that equations of a body make of random bits, not of other masks."""
    eqns = (body.eqns[i] for i in positions)
    first = (e for e in eqns if not any(map(is_mask, filter(is_var, e.invars))))
    masks = (v for e in first for v in e.outvars if is_mask(v))
    return [v for v in masks if is_of_draws(body, [v])]


def is_of_draws(body: JaxprGraph, variables: Iterable[Any]) -> bool:
    """Whether any is made of random bits by operations that XLA fuses."""
    todo, seen = list(variables), set()
    while todo:
        v = todo.pop()
        if v in seen or v not in body.maker:
            continue
        seen.add(v)
        eqn = body.eqns[body.maker[v]]
        if primitives.is_random_bits(eqn):
            return True
        if fused_only(eqn) is not None:
            todo += filter(is_var, eqn.invars)
    return False


def drawn_bytes(body: JaxprGraph, positions: Iterable[int]) -> int:
    """Bytes of the largest of these masks, which is there while it is read."""
    return max(map(size_of, drawn(body, positions)), default=0)
