"""An optax transformation that is run on the rows of a table that have a gradient.

Which leaves of a state belong to a table is not said by optax. It is seen from what
`init` makes of a table with one row more: leaves that grow are the table's.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr
from jaxtyping import PyTree

from jaxmem._checks import shown
from jaxmem.ir.unique_rows import put_rows, take_rows
from jaxmem.optim.rows.gradients import is_rows


def rowwise(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """`tx` on the touched rows of tables, and on other parameters as it is.

    For a table with gradient G, given as `RowGradients`, and state S, with t the rows
    that G names:

        u_t, S_t <- tx(G_t, S_t, p_t),    S elsewhere as it is,    u = 0 elsewhere

    Rows are summed where an id comes twice, gathered, updated and scattered into the
    state in place. Beyond a few arrays of one row an id there are no temporaries. `tx`
    may be a chain, and take the whole tree: other leaves have what it gives them alone,
    and norms over all gradients are those of dense gradients. Over micro-batches
    `jaxmem.microbatch(loss_fn, rowwise(tx), n, tables=...)` has the rows of all.

    Rows without a gradient do not move: for rules whose update of a zero gradient is
    zero and leaves the state (SGD, Adagrad) the result is that of `tx` with dense
    gradients. It is not for moments and weight decay, which are then lazy: they decay
    where a row is touched (see `lazy_adam`).

    State, in bytes a parameter: that of `tx`. Non-finite gradients go where `tx` takes
    them, in the touched rows.

    Args:
      tx: a transformation that treats the elements, or the rows, of a table by
        themselves.

    Returns:
      An `optax.GradientTransformationExtraArgs` with the state of `tx`. Its updates
      have `RowGradients` instead of tables, which `optax.apply_updates` adds in
      place.

    Raises:
      TypeError: a `tx` that is no optax transformation.
      ValueError: from `update`, updates without `RowGradients` (as of
        `jaxmem.microbatch` without `tables`); a table and a parameter or state of other
        shapes; a state that mixes rows, or counts calls before it updates, by its path.

    Source:
      The lazy optimizers of TensorFlow and of PyTorch's SparseAdam.

    Example::

      tx = jaxmem.optim.rowwise(optax.chain(optax.clip_by_global_norm(1.0),
                                            optax.adam(1e-3)))
      state = tx.init(params)
      loss, grads = jaxmem.optim.value_and_row_grad(loss_fn, "embed/*")(params, batch)
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)
    """
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(f"rowwise: tx={shown(tx)}: an optax transformation")
    inner = optax.with_extra_args_support(tx)

    def update(updates, state, params=None, **extra_args):
        given, tree = jax.tree.flatten_with_path(updates, is_leaf=is_rows)
        if not any(is_rows(g) for _, g in given):
            raise ValueError(
                f"rowwise: updates={shown(updates)}: no RowGradients among them; "
                "jaxmem.optim.value_and_row_grad makes them, and jaxmem.microbatch if "
                "you pass it tables=...; with dense gradients run the optimizer "
                "without `rowwise`"
            )
        summed = [g.summed() if is_rows(g) else g for _, g in given]
        owners = _owners(inner, tree, given, state)
        places = [g.ids if is_rows(g) else None for g in summed]
        rows = [g.rows if is_rows(g) else g for g in summed]
        if params is not None:
            params = _rows_of_params(tree, given, places, params)
        narrow = _taken(state, owners, places)
        new, after = inner.update(tree.unflatten(rows), narrow, params, **extra_args)
        new = [
            g.with_rows(u) if is_rows(g) else u
            for g, u in zip(summed, tree.flatten_up_to(new), strict=True)
        ]
        return tree.unflatten(new), _put(state, after, owners, places)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _rows_of_params(tree, given, places: Sequence[Any], params: PyTree) -> PyTree:
    """The parameters, of tables the touched rows."""
    leaves = tree.flatten_up_to(params)
    for (path, g), p in zip(given, leaves, strict=True):
        if is_rows(g) and jnp.shape(p) != g.shape:
            raise ValueError(
                f"rowwise: params{keystr(path)}={shown(p)}: a table of the shape of "
                f"its gradient, {g.shape}"
            )
    taken = [
        p if at is None else take_rows(p, at)
        for p, at in zip(leaves, places, strict=True)
    ]
    return tree.unflatten(taken)


def _taken(state: PyTree, owners: Sequence[int | None], places) -> PyTree:
    leaves, tree = jax.tree.flatten(state)
    rows = [
        x if owner is None else take_rows(x, places[owner])
        for x, owner in zip(leaves, owners, strict=True)
    ]
    return tree.unflatten(rows)


def _put(state: PyTree, after: PyTree, owners: Sequence[int | None], places) -> PyTree:
    """The state with the rows of `after`, or all of a leaf that is no table's."""
    leaves, tree = jax.tree.flatten(state)
    new = [
        y if owner is None else put_rows(x, places[owner], y.astype(x.dtype))
        for x, y, owner in zip(leaves, tree.flatten_up_to(after), owners, strict=True)
    ]
    return tree.unflatten(new)


def _owners(
    tx: optax.GradientTransformation, tree, given, state: PyTree
) -> list[int | None]:
    """For each leaf of the state the gradient of rows whose table it belongs to."""
    shapes = [jax.ShapeDtypeStruct(g.shape, g.dtype) for _, g in given]
    plain = _state_shapes(tx, tree, shapes)
    named = jax.tree.leaves_with_path(state)
    if [jnp.shape(x) for _, x in named] != plain:
        raise ValueError(
            f"rowwise: state={shown(state)}: not the state of this transformation for "
            "these parameters"
        )
    _check_calls(state)
    owners: list[int | None] = [None] * len(plain)
    for k, (path, g) in enumerate(given):
        for axis in range(len(g.shape)) if is_rows(g) else ():
            other = list(shapes)
            other[k] = jax.ShapeDtypeStruct(_longer(g.shape, axis), g.dtype)
            for j, shape in enumerate(_state_shapes(tx, tree, other)):
                if shape == plain[j]:
                    continue
                if axis == 0 and shape == _longer(plain[j], 0):
                    owners[j] = k
                elif axis == 0 or owners[j] != k:
                    raise ValueError(
                        f"rowwise: state{keystr(named[j][0])}={shown(named[j][1])} "
                        f"mixes the rows of the table {keystr(path)}: a transformation "
                        "whose state is an element or a row for each"
                    )
    return owners


def _state_shapes(tx: optax.GradientTransformation, tree, shapes) -> list[tuple]:
    made = jax.eval_shape(tx.init, tree.unflatten(shapes))
    return [x.shape for x in jax.tree.leaves(made)]


def _longer(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return tuple(n + (i == axis) for i, n in enumerate(shape))


def _check_calls(state: PyTree) -> None:
    """Whoever accumulates over calls has other rows each time."""
    collects = lambda x: isinstance(x, optax.MultiStepsState)
    for path, x in jax.tree.leaves_with_path(state, is_leaf=collects):
        if collects(x):
            raise ValueError(
                f"rowwise: state{keystr(path)}={shown(x)} is of optax.MultiSteps, "
                "whose calls touch other rows each: jaxmem.microbatch(tables=...) "
                "takes the rows of several micro-batches at once"
            )
