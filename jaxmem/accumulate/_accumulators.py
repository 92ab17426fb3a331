"""How the gradients of micro-batches become one update: in the state, or in a sum.

The arithmetic is elementwise and leaf by leaf, the carry of the loop is the optimizer's
state itself, and no pass over it comes before the loop. So `jaxmem.schedule` can move
the additions into the backward pass, and XLA keeps one buffer for all micro-batches.
"""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmem.accumulate._options import StepOptions
from jaxmem.accumulate._tables import (
    RowTables,
    check_takes_rows,
    gradient_of,
    rows_of,
    telling_of_rows,
)
from jaxmem.accumulate._trees import any_of, choose, mean
from jaxmem.memory import format_bytes
from jaxmem.optim.accumulation import (
    accumulate_step,
    accumulates,
    accumulation_dtype,
    apply_step,
    axis_text,
    dependent_paths,
    map_accumulating,
    per_device,
    per_device_fields,
    start_step,
)

_LOGGER = logging.getLogger("jaxmem")


class Accumulator(NamedTuple):
    """The carry of the loop over micro-batches, and what to do with it."""

    # The names are those of `optax.microbatching.Accumulator`, which cannot serve: it
    # makes its carry from the shapes of a gradient, where this one is the optimizer's
    # state, and it takes no weight and no mask.

    init: Any  # the carry before the first micro-batch
    # `(carry, grads, share, keep) -> (carry, rows)`; a share of None is 1/n, a keep of
    # None is True. The loop stacks `rows`, which only tables have
    update: Callable
    # `(carry, rows, updated) -> (updates, opt_state)`; `opt_state` is the one before if
    # the scalar `updated`, where None is True, is False
    finalize: Callable


def accumulator_for(
    tx, params, opt_state, options: StepOptions, tables: RowTables | None = None
) -> Accumulator:
    """Accumulates in the optimizer's state if the optimizer can, else in a sum."""
    # One micro-batch on one device is a plain update: there is nothing to add up.
    in_state = accumulates(opt_state)
    if in_state and options.accumulator_dtype is not None:
        raise ValueError(
            f"accumulator_dtype={options.accumulator_dtype!r}: an optimizer such as "
            "AdamA has no accumulator; its moments have the dtypes mu_dtype and "
            "nu_dtype"
        )
    if tables is not None:
        check_takes_rows(in_state, options.tables)
        return _in_rows(tx, tables, opt_state, options)
    if in_state and options.axis_name:
        return _in_per_device_state(tx, params, opt_state, options)
    if options.n == 1 and not options.axis_name:
        extra = {"micro_batches": 1} if in_state else {}
        finalize = functools.partial(_update, tx, params, opt_state, **extra)
        return _without_rows(None, lambda _, grads, share, keep: grads, finalize)
    make = _in_state if in_state else _in_sum
    return make(tx, params, opt_state, options)


def _without_rows(init, update: Callable, finalize: Callable) -> Accumulator:
    """One whose loop stacks nothing."""
    return Accumulator(
        init,
        lambda *args: (update(*args), None),
        lambda carry, rows, updated: finalize(carry, updated),
    )


def _update(tx, params, opt_state, grads, updated, **extra):
    update = optax.with_extra_args_support(tx).update
    updates, new_state = update(grads, opt_state, params, **extra)
    return updates, choose(updated, new_state, opt_state)


def _in_state(tx, params, opt_state, options: StepOptions) -> Accumulator:
    def update(state, grads, share, keep):
        new = accumulate_step(
            tx, grads, state, params, micro_batches=options.n, weight=share
        )
        return choose(keep, new, state)

    def finalize(state, updated):
        updates, new_state = apply_step(tx, state, params)
        return updates, choose(updated, new_state, state)

    return _without_rows(opt_state, update, finalize)


def _in_per_device_state(tx, params, opt_state, options: StepOptions) -> Accumulator:
    """If a device skips an iteration, it contributes a zero gradient."""
    # If all devices skip it, the iteration leaves the state as it was. This takes a
    # scalar of all devices in every iteration. In return only the per-device fields
    # differ between devices, and no copy of them is needed for a mini-batch without any
    # micro-batch that counts.
    axes = options.axis_name
    _check_multi_steps(opt_state, axes)
    init, local = start_step(opt_state, params, axes)
    _check_reduced(tx, local, init, axes)
    _check_same_on_devices(tx, local, init, options)

    def update(state, grads, share, keep):
        new = accumulate_step(
            tx, grads, state, params, micro_batches=options.n, weight=share, keep=keep
        )
        return choose(any_of(keep, axes), new, state)

    def apply(state):
        return apply_step(tx, state, params)

    def skip(state):
        zeros = lambda x: jnp.zeros(x.shape, x.dtype)
        updates = jax.tree.map(zeros, jax.eval_shape(apply, state)[0])
        # The values are equal on all devices, so their maximum is each of them; it
        # tells the types of a shard_map that they are.
        same = lambda x: jax.lax.pmax(x, axes)
        restored = lambda before, s: before._replace(
            **{k: jax.tree.map(same, x) for k, x in per_device_fields(s).items()}
        )
        return updates, map_accumulating(restored, opt_state, state)

    def finalize(state, updated):
        if updated is None:
            return apply(state)
        return jax.lax.cond(updated, apply, skip, state)

    return _without_rows(init, update, finalize)


def _check_multi_steps(opt_state, axes) -> None:
    is_multi = lambda s: isinstance(s, optax.MultiStepsState)
    multi = filter(is_multi, jax.tree.leaves(opt_state, is_leaf=is_multi))
    if any(accumulates(s) for s in multi):
        raise ValueError(
            f"microbatch(axis_name={axis_text(axes)}) with a MultiSteps around an "
            "optimizer that accumulates: between two steps its moments would differ "
            "from device to device; pass that optimizer itself, and a larger n"
        )


def _check_reduced(tx, params, state, axes) -> None:
    """The optimizer has the axes too: at the end it reduces over them."""
    traced = jax.make_jaxpr(lambda s: apply_step(tx, s, params))(state)
    reduced = {getattr(effect, "name", None) for effect in traced.effects}
    if missing := {*axes} - reduced:
        raise ValueError(
            f"microbatch(axis_name={axis_text(axes)}), but the optimizer in tx does "
            f"not reduce its moments over {sorted(missing)}: give it the same axis_name"
        )


def _check_same_on_devices(tx, params, state, options: StepOptions) -> None:
    """Only accumulating states may depend on a gradient: others would differ."""

    def others(grads):
        new = accumulate_step(tx, grads, state, params, micro_batches=options.n)
        return map_accumulating(lambda s: None, new)

    if names := dependent_paths(others, params):
        raise ValueError(
            f"opt_state{names[0]} depends on the gradients of micro-batches, so with "
            f"axis_name={axis_text(options.axis_name)} it would differ from device to "
            "device: no other transformation in tx may keep such a state there"
        )


def _in_sum(tx, params, opt_state, options: StepOptions) -> Accumulator:
    def finalize(total, updated):
        grads = _mean_gradient(total, params, options)
        return _update(tx, params, opt_state, grads, updated)

    init = _zeros(params, options)
    add = functools.partial(_add, options.n)
    return _without_rows(init, add, finalize)


def _in_rows(tx, tables: RowTables, opt_state, options: StepOptions) -> Accumulator:
    """Gradients of tables as rows of all micro-batches, those of others in a sum."""
    n, axes = options.n, options.axis_name
    of_tables, others = tables.apart(tables.params)
    alone = n == 1 and not axes

    def update(total, grads, share, keep):
        found, rest = tables.apart(grads)
        scale = lambda g: _scaled(n, g, share)
        rows = [rows_of(g, options.accumulator_dtype, scale, keep) for g in found]
        return rest if alone else _add(n, total, rest, share, keep), rows

    def finalize(total, rows, updated):
        rest = total if alone else _mean_gradient(total, others, options)
        found = [gradient_of(x, p, axes) for x, p in zip(rows, of_tables, strict=True)]
        grads = tables.together(found, rest)
        with telling_of_rows():
            return _update(tx, tables.params, opt_state, grads, updated)

    return Accumulator(None if alone else _zeros(others, options), update, finalize)


def _zeros(params, options: StepOptions) -> Any:
    """An accumulator of the gradients of these parameters."""

    def zeros(p):
        dtype = options.accumulator_dtype
        return jnp.zeros_like(
            p, dtype=accumulation_dtype(p) if dtype is None else dtype
        )

    init = per_device(jax.tree.map(zeros, params), options.axis_name)
    if options.n > 1:  # else there is no loop that would carry them
        log_once(
            "microbatch: no optimizer in tx accumulates in its own state, so the "
            f"gradients of n={options.n} micro-batches are summed in an accumulator of "
            f"{tree_bytes(init)}, which jaxmem.optim.adama does without"
        )
    return init


def _mean_gradient(total, params, options: StepOptions) -> Any:
    total = mean(total, options.axis_name)
    # the dtypes that jax.grad gives, which the optimizer's state is made for
    return jax.tree.map(lambda g, p: g.astype(p.dtype), total, params)


def _add(n: int, total, grads, share, keep):
    """The products are in float32 or wider, and rounded once to the sum's dtype."""

    def add(t, g):
        term = _scaled(n, g.astype(accumulation_dtype(g)), share)
        return t + term.astype(t.dtype)

    return choose(keep, jax.tree.map(add, total, grads), total)


def _scaled(n: int, g, share):
    return g / n if share is None else g * share.astype(g.dtype)


@contextlib.contextmanager
def naming_axis(axes: tuple[str, ...]):
    """Adds the missing argument to the error of an optimizer outside of its axis."""
    try:
        yield
    except ValueError as error:
        if axes or "axis_name=" not in str(error):
            raise
        raise ValueError(
            f"{error}. A step of microbatch(axis_name=...), with the axis_name of the "
            "optimizer, does what is needed"
        ) from error


def tree_bytes(tree) -> str:
    """The bytes of the arrays, as text; a TrainState's step may be a Python number."""
    arrays = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]
    return format_bytes(sum(x.size * x.dtype.itemsize for x in arrays))


@functools.cache  # once a process
def log_once(message: str) -> None:
    _LOGGER.info(message)
