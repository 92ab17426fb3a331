"""Tables, whose gradients go from micro-batch to micro-batch as rows.

A sum of gradients that are rows is a list of all of them. So the scan over
micro-batches stacks the ids and rows of each, as many as the mini-batch has, where an
accumulator would have the size of the table.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Num

from jaxmem._checks import shown
from jaxmem._compat import varying_axes
from jaxmem._paths import (
    check_bools,
    paths_and_leaves,
    selectors,
    wanted_leaves,
)
from jaxmem.accumulate._overwritten import KEY
from jaxmem.optim import RowGradients, value_and_row_grad
from jaxmem.optim.accumulation import accumulation_dtype, count_devices

_WHO = "microbatch: tables"
_ALLOWED = "a pattern of paths, a function of (path, leaf), or a tree of bools"


class TableRows(NamedTuple):
    """What is added to a table: ids [n, k] or [k], and rows [..., *row] for each."""

    ids: Int32[Array, "..."]
    rows: Num[Array, "..."]


@dataclass(frozen=True)
class RowTables:
    """The parameters, and which of their leaves are tables."""

    params: Any
    wanted: tuple[bool, ...]

    def gradient(self, loss_fn: Callable) -> Callable:
        """`jax.value_and_grad(loss_fn, (0, 1), has_aux=True)`, with rows of tables."""
        pairs = zip(paths_and_leaves(self.params), self.wanted, strict=True)
        paths = {path for (path, _), own in pairs if own}
        deeper = {f"params/{path}" for path in paths}

        def of_trained(trained, overwritten, *args):
            loss = lambda one, *rest: loss_fn(one, overwritten, *rest)
            wanted = lambda path, leaf: path in paths
            out, grads = value_and_row_grad(loss, wanted, True)(trained, *args)
            return out, (grads, overwritten)

        def of_both(trained, overwritten, *args):
            loss = lambda both, *rest: loss_fn(both["params"], both[KEY], *rest)
            wanted = lambda path, leaf: path in deeper
            both = {"params": trained, KEY: overwritten}
            out, grads = value_and_row_grad(loss, wanted, True)(both, *args)
            return out, (grads["params"], grads[KEY])

        def gradient(trained, overwritten, *args):
            one = of_both if jax.tree.leaves(overwritten) else of_trained
            return one(trained, overwritten, *args)

        return gradient

    def apart(self, tree: Any) -> tuple[list[Any], list[Any]]:
        """(what belongs to tables, what belongs to the other parameters)."""
        leaves = jax.tree.structure(self.params).flatten_up_to(tree)
        pairs = list(zip(leaves, self.wanted, strict=True))
        return [x for x, own in pairs if own], [x for x, own in pairs if not own]

    def together(self, tables: Sequence[Any], others: Sequence[Any]) -> Any:
        """The inverse of `apart`."""
        of_tables, rest = iter(tables), iter(others)
        leaves = [next(of_tables if own else rest) for own in self.wanted]
        return jax.tree.unflatten(jax.tree.structure(self.params), leaves)


def tables_in(params: Any, tables: Any) -> RowTables | None:
    """Which of the parameters are tables, as users say it; None for no tables."""
    if tables is None:
        return None
    wanted = wanted_leaves(_WHO, tables, params, _ALLOWED)
    if not any(wanted):
        raise ValueError(
            f"{_WHO}={shown(tables)}: selects none of the parameters; leave it out if "
            "there is no table"
        )
    return RowTables(params, tuple(wanted))


def check_tables(tables: Any) -> None:
    """TypeError for what selects no parameters."""
    if tables is not None and selectors(tables) is None:
        check_bools("tables", tables, _ALLOWED)


def check_takes_rows(in_state: bool, tables: Any) -> None:
    """ValueError for an optimizer that accumulates in its own state."""
    if in_state:
        raise ValueError(
            f"microbatch(tables={shown(tables)}) with an optimizer that accumulates in "
            "its own state, as AdamA does: its moments take a dense gradient in each "
            "micro-batch; give tables, and the other parameters, a rule that takes the "
            "gradient of the mini-batch, as jaxmem.optim.rowwise(optax.adam(...))"
        )


@contextlib.contextmanager
def telling_of_rows() -> Iterator[None]:
    """Adds what the optimizer was given to the error of one that takes no rows."""
    try:
        yield
    except (TypeError, ValueError, AttributeError) as error:
        if str(error).startswith("rowwise"):
            raise
        raise ValueError(
            "microbatch(tables=...): the optimizer is given RowGradients of tables, "
            "which a rule for rows takes: jaxmem.optim.rowwise(tx), lazy_adam, "
            f"rowwise_adagrad, rowwise_sgd; it raised {type(error).__name__}: {error}"
        ) from error


def rows_of(
    gradient: RowGradients, dtype: Any, scale: Callable, keep: Any
) -> TableRows:
    """What a micro-batch adds; without `keep` its ids name no row."""
    wide = gradient.rows.astype(accumulation_dtype(gradient.rows))
    ids = gradient.ids
    if keep is not None:
        ids = jnp.where(keep, ids, jnp.asarray(gradient.shape[0], ids.dtype))
    return TableRows(ids, scale(wide).astype(wide.dtype if dtype is None else dtype))


def gradient_of(found: TableRows, table: Any, axes: tuple[str, ...]) -> RowGradients:
    """The rows of all micro-batches, and devices, as the gradient of the table."""
    ids, rows = found
    ids, rows = ids.reshape(-1), rows.reshape(-1, *table.shape[1:])
    if axes:
        ids, rows = (_of_all_devices(x, axes) for x in (ids, rows))
        rows = rows / count_devices(axes)
    whole = RowGradients(ids, rows, table.shape)
    if rows.dtype == table.dtype:
        return whole
    whole = whole.summed()  # in the wider dtype, and rounded once
    return whole.with_rows(whole.rows.astype(table.dtype))


def _of_all_devices(x: Array, axes: tuple[str, ...]) -> Array:
    """[k, ...] of every device, one after another; for types the same on each."""
    to = "invarying" if varying_axes(x) & {*axes} else "varying"
    return jax.lax.all_gather(x, axes, tiled=True, to=to)
