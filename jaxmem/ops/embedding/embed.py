"""A lookup of rows."""

import jax
from jaxtyping import Array, ArrayLike, Float, Integer

from jaxmem.ops.embedding.lookup import (
    OutOfRange,
    check_ids,
    check_table,
    indices,
    taken,
)


def embed(
    table: Float[ArrayLike, " rows *row"],
    ids: Integer[ArrayLike, "..."],
    *,
    out_of_range: OutOfRange | None = None,
) -> Float[Array, "..."]:
    """The rows of a table that ids name, `table[ids]`.

    The gradient of the table is a scatter-add of the rows' gradients, in the dtype of
    the table. `jaxmem.optim.value_and_row_grad` gives these rows instead, and
    `jaxmem.schedule` updates the rows alone where that is exact.

    Args:
        table: floating; its first axis is that of the rows.
        ids: integers from -rows to rows - 1; negative ones count from the end.
        out_of_range: what other ids give. "fill": NaN, and no gradient; "clip": the
            nearest row, which takes the gradient; both as in `jnp.take`. None: an error
            where the ids are known at the call, which waits for them; under a trace (in
            `jit`, `scan`) NaN.

    Returns:
        An array of the shape of ids followed by that of a row, in the table's dtype.

    Raises:
        TypeError: a table that is not floating; ids that are no integers.
        ValueError: a table without rows; ids out of range, which it names; another
            `out_of_range`.

    Saves:
        The ids, 4 bytes each.

    Example::

        y = jaxmem.ops.embed(params["embed"]["table"], tokens)  # [..., d]
    """
    table = check_table("embed", table)
    ids = check_ids("embed", table, ids, out_of_range)
    with jax.named_scope("jaxmem.embed"):
        return taken(table, indices(ids, table.shape[0], out_of_range))
