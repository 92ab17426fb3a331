"""Look-ups along an axis of which there is one block: logits of labels, and back."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode as Mode

from jaxmem import _compat
from jaxmem.ir import primitives

_PLAIN = {"indices_are_sorted": False, "unique_indices": False}


@dataclass(frozen=True)
class Part:
    """A block of an axis: where it starts (traced), and its length."""

    axis: int
    start: Any
    size: int


def taken(eqn, args: Sequence[Any], part: Part):
    """Rows that are looked up in this block, and zeros for those in others."""
    table, index = args
    place = _place(eqn, index, part.axis) - part.start
    inside = (place >= 0) & (place < part.size)
    index = _placed(eqn, index, part.axis, jnp.clip(place, 0, part.size - 1))
    params = {**eqn.params, **_PLAIN}
    (rows,) = _compat.bind(eqn, [table, index], params)
    return jnp.where(_like_rows(eqn, inside), rows, jnp.zeros_like(rows))


def put(eqn, args: Sequence[Any], part: Part) -> list[Any]:
    """Adds to the places that are in this block."""
    table, index, rows = args
    place = _place(eqn, index, part.axis) - part.start
    if _is_one_each(eqn, part.axis):
        # a comparison is fused into what follows, and a scatter is not
        along = [1 if d == part.axis else size for d, size in enumerate(table.shape)]
        words = lax.broadcasted_iota(jnp.int32, table.shape, part.axis)
        rows = rows.reshape(along)
        added = jnp.where(words == place.reshape(along), rows, jnp.zeros_like(rows))
        return [table + added]
    inside = (place >= 0) & (place < part.size)
    # what is out of bounds is dropped
    index = _placed(eqn, index, part.axis, jnp.where(inside, place, part.size))
    params = {**eqn.params, **_PLAIN, "mode": Mode.FILL_OR_DROP}
    return _compat.bind(eqn, [table, index, rows], params)


def filled(eqn, index, axis: int, total):
    """What was looked up in all blocks, and what it is for places in none."""
    if eqn.params["mode"] != Mode.FILL_OR_DROP:
        return total
    place = _place(eqn, index, axis)
    outside = (place < 0) | (place >= eqn.invars[0].aval.shape[axis])
    fill = _fill(total.dtype, eqn.params["fill_value"])
    return jnp.where(_like_rows(eqn, outside), fill, total)


def _component(eqn, axis: int) -> int:
    """Which number of an index is the place along the axis."""
    numbers = eqn.params["dimension_numbers"]
    gather = primitives.is_gather(eqn)
    names = "start_index_map" if gather else "scatter_dims_to_operand_dims"
    return getattr(numbers, names).index(axis)


def _is_one_each(eqn, axis: int) -> bool:
    """Whether a scatter adds to one place in each row along the axis."""
    numbers, (table, index, _) = eqn.params["dimension_numbers"], eqn.invars
    others = tuple(d for d in range(table.aval.ndim) if d != axis)
    sizes = [table.aval.shape[d] for d in others]
    return (
        tuple(numbers.operand_batching_dims) == others
        and tuple(numbers.scatter_indices_batching_dims) == tuple(range(len(others)))
        and math.prod(index.aval.shape) == math.prod(sizes)
    )


def _place(eqn, index, axis: int):
    """Places along the axis that indices name."""
    place = index[..., _component(eqn, axis)].astype(jnp.int32)
    if eqn.params["mode"] == Mode.CLIP:
        place = jnp.clip(place, 0, eqn.invars[0].aval.shape[axis] - 1)
    return place


def _placed(eqn, index, axis: int, place):
    """The indices with other places along the axis."""
    k, index = _component(eqn, axis), index.astype(jnp.int32)
    if not primitives.is_gather(eqn) and eqn.params["mode"] == Mode.CLIP:
        # those along other axes: they are dropped now where they were clipped
        axes = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
        most = [eqn.invars[0].aval.shape[d] - 1 for d in axes]
        most = jnp.broadcast_to(jnp.asarray(most, jnp.int32), index.shape)
        index = jnp.clip(index, 0, most)
    return index.at[..., k].set(place)


def _like_rows(eqn, mask):
    """A mask of places, of the shape of the rows that are looked up there."""
    out = eqn.outvars[0].aval
    inside = eqn.params["dimension_numbers"].offset_dims
    shape = [1 if d in inside else size for d, size in enumerate(out.shape)]
    assert math.prod(shape) == mask.size
    return jnp.broadcast_to(mask.reshape(shape), out.shape)


def _fill(dtype, value):
    """What a look-up out of bounds gives."""
    if value is not None:
        return jnp.asarray(value, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    info = jnp.iinfo(dtype)
    signed = jnp.issubdtype(dtype, jnp.signedinteger)
    return jnp.asarray(info.min if signed else info.max, dtype)
