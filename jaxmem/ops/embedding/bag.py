"""A sum, mean or maximum of the rows of a bag of ids.

The rows of a bag are as many as its ids, and the derivatives of weights and of a
maximum need them. They are looked up a second time in the backward pass: what is kept
are ids.
"""

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Integer

from jaxmem._checks import check_array, shown, wrong_value
from jaxmem.ops.codes.stored import is_nonzero
from jaxmem.ops.common.lean import widen
from jaxmem.ops.embedding.lookup import (
    OutOfRange,
    check_ids,
    check_table,
    indices,
    taken,
)

Reduction = Literal["sum", "mean", "max"]


def embedding_bag(
    table: Float[ArrayLike, " rows *row"],
    ids: Integer[ArrayLike, "... bag"],
    weights: Float[ArrayLike, "... bag"] | None = None,
    mode: Reduction = "sum",
    *,
    out_of_range: OutOfRange | None = None,
) -> Float[Array, "..."]:
    """The rows of each bag of ids as one: their sum, mean or largest elements.

    "sum" is `sum_i w_i table[ids_i]` over the last axis of ids, "mean" the same divided
    by `sum_i w_i`, with weights of 1 where none are given; "max" the largest of each
    element, whose gradient rows that are equal there share. Bags of fewer ids are
    filled up with any row and weight 0. Sums are in float32 at least, rounded once.

    Args:
        table: floating; its first axis is that of the rows.
        ids: integers, the bag along the last axis; negative ones count from the end.
        weights: floating, of the shape of ids; None with "max".
        mode: "sum", "mean" or "max".
        out_of_range: what ids outside of the table give, as in `embed`.

    Returns:
        An array of the shape of ids without its last axis, followed by that of a row,
        in the table's dtype.

    Raises:
        TypeError: a table or weights that are not floating; ids that are no integers.
        ValueError: ids without an axis or with empty bags; ids out of range, which it
            names; weights of another shape, or with "max"; another `mode`.

    Saves:
        The ids, 4 bytes each, and nothing for weights or a maximum: the backward pass
        looks the rows up a second time, where they are needed.

    Example::

        table, weights = params["embed"]["table"], jnp.ones(tokens.shape)
        y = jaxmem.ops.embedding_bag(table, tokens, weights)  # [batch, d]
    """
    if mode not in get_args(Reduction):
        raise wrong_value("embedding_bag: mode", mode, "'sum', 'mean' or 'max'")
    table = check_table("embedding_bag", table)
    given, ids = ids, check_ids("embedding_bag", table, ids, out_of_range)
    if not ids.ndim or not ids.shape[-1]:
        raise wrong_value("embedding_bag: ids", given, "a bag of at least one id")
    if weights is not None:
        check_array("embedding_bag: weights", weights, "floating")
        if mode == "max" or jnp.shape(weights) != ids.shape:
            raise ValueError(
                f"embedding_bag: weights={shown(weights)}, ids={shown(ids)}, "
                f"mode={mode!r}: weights of the shape of the ids, and none for 'max'"
            )
        weights = jnp.asarray(weights)
    with jax.named_scope("jaxmem.embedding_bag"):
        places = indices(ids, table.shape[0], out_of_range)
        return bag_of(mode, table, places, weights)


def _reduced(mode: Reduction, axis: int, rows: Array, weights: Array | None) -> Array:
    """Of rows [*n, bag, *row], whose bags lie along `axis`."""
    if mode == "max":
        return jnp.max(rows, axis)
    wide = widen(rows)
    if weights is None:
        total = jnp.sum(wide, axis)
        divided = total / rows.shape[axis] if mode == "mean" else total
        return divided.astype(rows.dtype)
    weights = weights.astype(wide.dtype)
    if mode == "mean":
        weights = weights / jnp.sum(weights, -1, keepdims=True)
    spread = weights.reshape(*weights.shape, *(1,) * (rows.ndim - weights.ndim))
    return jnp.sum(wide * spread, axis).astype(rows.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def bag_of(mode, table, places, weights):
    """`embedding_bag` of ids that are `indices` already."""
    return _reduced(mode, places.ndim - 2, taken(table, places), weights)


@functools.partial(bag_of.defjvp, symbolic_zeros=True)
def _bag_jvp(mode, primals, tangents):
    table, places, weights = primals
    axis = places.ndim - 2
    # The lookup of the tangent is not part of the checkpoint: the gradient of the table
    # is to be seen as a scatter-add.
    moved = is_nonzero(tangents[0])
    rows_dot = taken(tangents[0], places) if moved else None
    weighted = weights is not None and is_nonzero(tangents[2])

    def linear(table, places, weights, rows_dot, weights_dot):
        # behind a barrier: XLA would take the rows of the forward pass and keep them
        rows = taken(table, lax.optimization_barrier(places))
        zero = lambda dot, x: jnp.zeros_like(x) if dot is None else dot
        if weights is None:
            reduced = lambda rows: _reduced(mode, axis, rows, None)
            return jax.jvp(reduced, (rows,), (zero(rows_dot, rows),))[1]
        reduced = lambda rows, weights: _reduced(mode, axis, rows, weights)
        dots = zero(rows_dot, rows), zero(weights_dot, weights)
        return jax.jvp(reduced, (rows, weights), dots)[1]

    tangent = jax.checkpoint(linear, prevent_cse=False)(
        table, places, weights, rows_dot, tangents[2] if weighted else None
    )
    return bag_of(mode, table, places, weights), tangent
