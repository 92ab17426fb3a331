"""Whether gradients are among what the parts of a batch add up.

A gradient is told by what it is: a sum over the examples that products lead to, of the
shape of something that every part reads whole. Who has differentiated the step, and
whether products are in the bodies of scans or outside, makes no difference.
"""

from typing import Any

import jax.numpy as jnp

from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.placements import REPLICATE, Partial
from jaxmem.ir.scans import is_var
from jaxmem.scheduling.tiling.partial_sums import moves_sums


def has_product(eqn) -> bool:
    """Whether an equation is a product, or has one in its bodies."""
    inner = (e for body in jaxprs.bodies(eqn) for e in jaxprs.walk(body))
    return any(primitives.is_product(e) for e in (eqn, *inner))


def has_gradients(batch) -> bool:
    """Whether one of the sums of a batch (`batch.Batch`) is a gradient."""
    shapes, behind = _read_whole(batch), _behind_products(batch)
    # a step that is elementwise has no product in its parts
    of_products = (v for v in batch.frontier()[0] if v in behind or not behind)
    return any(_made_of(batch, v) & shapes for v in of_products)


def _read_whole(batch) -> set[tuple[int, ...]]:
    """The shapes of arrays that every part reads whole: weights are among them."""
    found = set()
    for i, placements in batch.placed.items():
        for v, p in zip(batch.graph.eqns[i].invars, placements.ins, strict=True):
            if p == REPLICATE and is_var(v) and _is_float_array(v):
                found.add(v.aval.shape)
    return found


def _is_float_array(v) -> bool:
    # a number without axes is the loss more often than a weight
    return v.aval.ndim > 0 and jnp.issubdtype(v.aval.dtype, jnp.inexact)


def _behind_products(batch) -> set[Any]:
    """Variables of the parts that a product leads to."""
    products = {i for i in batch.placed if has_product(batch.graph.eqns[i])}
    return batch.graph.behind(products, sorted(batch.placed))


def _made_of(batch, v) -> set[tuple[int, ...]]:
    """Shapes of a sum, and of the sums that it was moved together from."""
    work, seen = [v], {v}
    while work:
        eqn = batch.graph.eqns[batch.graph.maker[work.pop()]]
        if not moves_sums(eqn):
            continue
        sums = (w for w in eqn.invars if isinstance(batch.at(w), Partial))
        new = set(sums) - seen
        work += new
        seen |= new
    return {w.aval.shape for w in seen}
