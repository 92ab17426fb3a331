"""Values and gradients in which those of tables are rows.

JAX's gradient of an array is an array of its shape. So the gradient is traced, and what
is computed of it stops before the scatter-add that would make a table's: the ids and
the rows that it takes are the result.
"""

from collections.abc import Callable
from typing import Any

import jax

from jaxmem._checks import check_bool, shown
from jaxmem._paths import paths_and_leaves, wanted_leaves
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.flatten import is_plain_call, opened
from jaxmem.ir.graph import JaxprGraph, Values
from jaxmem.ir.row_scatters import RowSums, Scatters
from jaxmem.ir.rows_outside import rows_outside, why_inside
from jaxmem.optim.rows.gradients import RowGradients

_WHO = "value_and_row_grad: tables"
_ALLOWED = "a pattern of paths, a function of (path, leaf), or a tree of bools"


def value_and_row_grad(
    loss_fn: Callable[..., Any], tables: Any, has_aux: bool = False
) -> Callable[..., Any]:
    """`jax.value_and_grad` whose gradients of tables are `RowGradients`.

    A table is read by lookups alone: `jaxmem.ops.embed` and `embedding_bag`,
    `jnp.take`, `table[ids]` with an array of ids, Flax's `Embed`. The model does not
    have to be changed. No array of the table's size is made: memory and time of its
    gradient are proportional to the ids. Several lookups in one table, casts of it,
    `jax.checkpoint`, and a `scan` or `cond` whose body reads it are seen through: a
    scan stacks the ids and rows of its iterations.

    A table that is read in another way too, such as one tied to the output layer, has a
    dense gradient, and is refused; so is one that is looked up inside a `shard_map`
    (which may be around the whole call: see `RowGradients.all_gather`), and a stack of
    tables of which a `scan` reads one in each iteration.

    Call it under `jit`: it traces the gradient at every call.

    Args:
      loss_fn: ``(params, *args, **kwargs) -> loss``, or ``(loss, aux)``.
      tables: which leaves of the first argument are tables: a pattern of paths such as
        "embed/table", a function of (path, leaf), several of these, or a tree of bools,
        as for `jaxmem.trainable`.
      has_aux: whether `loss_fn` returns (loss, aux).

    Returns:
      A function of the arguments of `loss_fn` that returns (loss, gradients), or
      ((loss, aux), gradients). Gradients are of the structure of the parameters, with
      `RowGradients` instead of tables; for a table that is not read, without rows.

    Raises:
      TypeError: a `loss_fn` that is no function, other `tables`.
      ValueError: a pattern without a match; a table whose gradient is dense: its path,
        and the operation that makes it so.

    Source:
      This library; asked for in jax's issue 18601.

    Example::

      tx = jaxmem.optim.rowwise(optax.adam(1e-3))  # for the other parameters as well

      @functools.partial(jax.jit, donate_argnums=(0, 1))
      def step(params, state, batch):
          grad = jaxmem.optim.value_and_row_grad(loss_fn, "embed/table")
          value, grads = grad(params, batch)
          updates, state = tx.update(grads, state, params)
          return optax.apply_updates(params, updates), state, value
    """
    if not callable(loss_fn):
        raise TypeError(
            f"value_and_row_grad: loss_fn={shown(loss_fn)}: a function of the "
            "parameters that returns a scalar"
        )
    check_bool("value_and_row_grad: has_aux", has_aux)
    if tables is None:
        raise TypeError(f"{_WHO}=None: {_ALLOWED}")
    differentiated = jax.value_and_grad(loss_fn, has_aux=has_aux)

    def value_and_rows(params: Any, *args: Any, **kwargs: Any) -> Any:
        named = paths_and_leaves(params)
        wanted = wanted_leaves(_WHO, tables, params, _ALLOWED)
        traced = jaxprs.trace(differentiated, params, *args, **kwargs)
        outs = _computed(traced, named, wanted)
        return jax.tree.unflatten(traced.out_tree, outs)

    return value_and_rows


def _computed(traced: jaxprs.Traced, named, wanted: list[bool]) -> list[Any]:
    """The outputs of a traced gradient, those of tables as rows."""
    shapes = {x.shape for (_, x), own in zip(named, wanted, strict=True) if own}
    of_table = lambda v, rows: v.aval.shape in shapes
    graph = JaxprGraph(rows_outside(_written_out(traced.jaxpr), of_table))
    values = Values(graph, graph.inputs(traced.leaves))
    first = len(graph.outvars) - len(named)  # the gradients come last
    sums = RowSums(graph, inside=why_inside)
    rows = {
        first + k: _scatters(sums, graph.outvars[first + k], path)
        for k, (path, _) in enumerate(named)
        if wanted[k]
    }
    for i, eqn in enumerate(graph.eqns):
        if eqn.effects:  # what nothing reads, such as a print
            values.evaluate(i)
    return [
        RowGradients(*rows[o].rows(values), rows[o].shape)
        if o in rows
        else values.read(v)
        for o, v in enumerate(graph.outvars)
    ]


def _scatters(sums: RowSums, v, path: str) -> Scatters:
    if why := sums.why(v):
        raise ValueError(
            f"{_WHO}: the gradient of {path!r} is dense: {why}; a table is read by "
            "lookups alone, and by a loop as a whole"
        )
    return sums.scatters(v)


def _written_out(closed):
    """The jaxpr with calls and recomputations in one list of equations."""

    def rule(eqn, args: list) -> list[Any] | None:
        remat = primitives.is_remat(eqn)
        return opened(eqn, args, rule) if remat or is_plain_call(eqn) else None

    return jaxprs.rewritten(closed, rule)
