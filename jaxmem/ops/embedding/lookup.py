"""Ids of rows of a table: checked, negative ones wrapped, and looked up."""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Integer

from jaxmem._checks import check_array, shown, wrong_value
from jaxmem.ir.jaxprs import is_abstract
from jaxmem.ops.common.explicit import is_sharded, sharding_of_taken

OutOfRange = Literal["fill", "clip"]

_NAMED = 5  # ids that an error shows


def check_table(name: str, table: Any, argument: str = "table") -> Array:
    """An array of floats with rows."""
    check_array(f"{name}: {argument}", table, "floating")
    table = jnp.asarray(table)
    if not table.ndim or not table.shape[0]:
        raise wrong_value(f"{name}: {argument}", table, "at least one row")
    return table


def check_ids(name: str, table: Array, ids: Any, out_of_range: Any) -> Array:
    """Integers; where their values are known, and no mode is asked for, of rows."""
    if out_of_range is not None and out_of_range not in get_args(OutOfRange):
        raise wrong_value(
            f"{name}: out_of_range", out_of_range, "'fill', 'clip' or None"
        )
    if not isinstance(ids, int) or isinstance(ids, bool):
        check_array(f"{name}: ids", ids, "integer")
    if out_of_range is None:
        _check_values(name, table.shape[0], ids)
    return jnp.asarray(ids)


def _check_values(name: str, count: int, ids: Any) -> None:
    if is_abstract(ids) or not getattr(ids, "is_fully_addressable", True):
        return
    values = np.asarray(ids)
    bad = np.unique(values[(values < -count) | (values >= count)])
    if bad.size:
        named = ", ".join(map(str, bad[:_NAMED].tolist()))
        more = f" and {bad.size - _NAMED} more" if bad.size > _NAMED else ""
        raise ValueError(
            f"{name}: ids={shown(ids)}: {named}{more} in a table of {count} rows, "
            f"whose ids are {-count} to {count - 1}; out_of_range='fill' or 'clip' "
            "takes others too"
        )


def indices(
    ids: Integer[Array, "..."], count: int, out_of_range: OutOfRange | None
) -> Int32[Array, "... 1"]:
    """Ids as `taken` has them: those from the end counted from the start.

    Others lie outside of the table still, or are those of the nearest rows.
    """
    dtype = jnp.dtype(jnp.int32)  # a narrow one need not hold the number of rows
    if ids.dtype.itemsize > 4:
        dtype = ids.dtype
    if ids.dtype == jnp.uint32:
        ids = jnp.minimum(ids, jnp.asarray(2**31 - 1, ids.dtype))
    ids = ids.astype(dtype)
    ids = jnp.where(ids < 0, ids + jnp.asarray(count, dtype), ids)
    # -1 and count are outside of the table on either side
    ends = (0, count - 1) if out_of_range == "clip" else (-1, count)
    ids = jnp.clip(ids, *(jnp.asarray(end, dtype) for end in ends))
    return ids.astype(jnp.int32)[..., None]


def taken(
    table: Float[Array, " rows *row"], places: Int32[Array, "... 1"]
) -> Float[Array, "..."]:
    """The rows at `indices`; NaN outside of the table."""
    if is_sharded(table, places):  # `gather` is not told how its result is
        ids = places[..., 0]
        how = {"mode": "fill", "wrap_negative_indices": False}
        return table.at[ids].get(out_sharding=sharding_of_taken(table, ids, 0), **how)
    batch = places.ndim - 1
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=tuple(range(batch, batch + table.ndim - 1)),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
    )
    sizes = (1, *table.shape[1:])
    return jax.lax.gather(table, places, numbers, sizes, mode="fill")
