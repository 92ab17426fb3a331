"""Rows of a table: those that ids name, each once, and in place.

How many ids differ is not known when a step is compiled, so there are as many slots as
ids. Slots that stay empty name rows behind the end of the table, each another one:
reads give zero there, writes are dropped, and the ids are still unique and sorted.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Num

from jaxmem._checks import wrong_value


def in_table(
    ids: Int32[Array, " k"], count: int
) -> tuple[Int32[Array, " k"], Bool[Array, " k"]]:
    """The ids, those outside of [0, count) as count; and which are inside."""
    inside = (ids >= 0) & (ids < count)
    return jnp.where(inside, ids, jnp.asarray(count, ids.dtype)), inside


def unique_rows(
    ids: Int32[Array, " k"], rows: Num[Array, " k *row"], count: int
) -> tuple[Int32[Array, " k"], Num[Array, " k *row"]]:
    """Each id once, in rising order, and the sum of its rows.

    Args:
      ids: of rows of a table; what lies outside of [0, count) counts as no row.
      rows: what is to be added to these rows.
      count: the rows of the table.

    Returns:
      Ids and sums of the same shapes; the slots behind the last id name rows from
      `count` on, and their sums are zero.
    """
    slots = ids.shape[0]
    # the slots that stay empty have ids behind the table, in int32 as well
    if count + slots >= 2**31:
        raise wrong_value("table: rows", count, "with the ids fewer than 2**31")
    if slots == 0:
        return ids, rows
    ids, inside = in_table(ids, count)
    rows = jnp.where(broadcast_rows(inside, rows), rows, jnp.zeros((), rows.dtype))
    # equal ids are neighbours then, and share a slot
    order = jnp.argsort(ids)
    ranked = ids[order]
    new = jnp.concatenate([jnp.ones(1, bool), ranked[1:] != ranked[:-1]])
    slot = jnp.cumsum(new, dtype=jnp.int32) - 1
    sums = jnp.zeros_like(rows).at[slot].add(rows[order], indices_are_sorted=True)
    behind = jnp.arange(count, count + slots, dtype=ids.dtype)
    # no id is above what `behind` has there; where none comes, that stays
    return behind.at[slot].min(ranked, indices_are_sorted=True), sums


def broadcast_rows(x: Array, like: Array) -> Array:
    """A number a row as an array that broadcasts against rows."""
    return x.reshape(*x.shape, *(1,) * (like.ndim - x.ndim))


def take_rows(x: Array, ids: Int32[Array, " k"]) -> Array:
    """The rows of `unique_rows`' ids; zero in the slots that are empty."""
    return x.at[ids].get(
        mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True
    )


def put_rows(x: Array, ids: Int32[Array, " k"], rows: Array) -> Array:
    """`x` with these rows instead of those of `unique_rows`' ids."""
    return x.at[ids].set(
        rows, mode="drop", unique_indices=True, indices_are_sorted=True
    )


def concatenated(
    parts: Sequence[tuple[Array, Array]], shape: Sequence[int], dtype: Any
) -> tuple[Int32[Array, " k"], Num[Array, " k *row"]]:
    """One list of ids [k] and rows [k, ...] of several of any leading shape."""
    row = tuple(shape[1:])
    if not parts:
        return jnp.zeros(0, jnp.int32), jnp.zeros((0, *row), dtype)
    ids = [i.reshape(-1) for i, _ in parts]
    rows = [r.reshape(i.size, *row) for i, r in parts]
    if len(parts) == 1:
        return ids[0], rows[0]
    return jnp.concatenate(ids), jnp.concatenate(rows)
