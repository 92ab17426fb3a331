"""One mini-batch on plain pytrees: a scan over micro-batches, then one update.

The parameters stay as they are until the scan is over. The last micro-batch is in the
scan too: the update is elementwise in the moments and needs no gradient.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr

from jaxmem._compat import varying_axes
from jaxmem.accumulate._accumulators import Accumulator, accumulator_for, naming_axis
from jaxmem.accumulate._mapped import mapped
from jaxmem.accumulate._options import StepOptions
from jaxmem.accumulate._overwritten import put_together, take_apart
from jaxmem.accumulate._tables import tables_in
from jaxmem.accumulate._trees import (
    Axes,
    all_finite,
    any_of,
    choose,
    replicated,
    shares_of,
    split_batch,
    split_keys,
    total,
    weights_of,
)
from jaxmem.accumulate._whole_batch import tell_of_examples_together
from jaxmem.optim.accumulation import accumulation_dtype, axis_text, per_device


class MiniBatchResult(NamedTuple):
    """What a mini-batch changes."""

    # `updated` is whether there was an update: a bool scalar, or None for always.

    params: Any
    opt_state: Any
    model_state: Any
    metrics: dict[str, Any]
    updated: Any


class MicroBatchResult(NamedTuple):
    """The loss of a micro-batch, its aux, and whether it counts (None for always)."""

    loss: Any
    aux: dict[str, Any]
    keep: Any
    rows: Any  # of the gradients of tables


def run_mini_batch(
    loss_fn: Callable,
    tx: optax.GradientTransformation,
    options: StepOptions,
    params,
    opt_state,
    model_state,
    batch,
    rng,
) -> MiniBatchResult:
    """One mini-batch. `loss_fn` is of `_loss.standard_loss`."""
    args = params, opt_state, model_state, batch, rng
    if options.mesh is None:
        return _run(loss_fn, *args, tx=tx, options=options)
    run = functools.partial(_run, tx=tx, options=options)
    return mapped(run, loss_fn, options, *args)


def _run(
    loss_fn: Callable,
    params,
    opt_state,
    model_state,
    batch,
    rng,
    *,
    tx: optax.GradientTransformation,
    options: StepOptions,
) -> MiniBatchResult:
    """The mini-batch of one device where `options` name axes, else of all."""
    n, axes = options.n, options.axis_name
    _check_axes(params, axes)
    batches, keys = split_batch(batch, n), split_keys(rng, n, axes)
    if options.mesh is None:  # else that has been done, outside of the map
        tell_of_examples_together(loss_fn, options, params, model_state, batch, rng)
    weights = weights_of(options.weight_fn, batches, n)
    shares = None if weights is None else shares_of(weights, axes)
    trained, overwritten = take_apart(params)

    def loss(trained, overwritten, *others):
        return loss_fn(put_together(trained, overwritten, params), *others)

    tables = tables_in(trained, options.tables)
    accumulator = accumulator_for(tx, trained, opt_state, options, tables)
    differentiated = _gradient(loss) if tables is None else tables.gradient(loss)
    # The gradient at replicated parameters would be reduced in every micro-batch.
    local = per_device(trained, axes)
    states = per_device((model_state, overwritten), axes)
    body = _body(differentiated, accumulator, options, local)
    carry = accumulator.init, states
    (carry, states), results = _scan(body, carry, (batches, keys, shares), n)
    updated = any_of(results.keep, axes)

    def finished(updated):
        updates, new_state = accumulator.finalize(carry, results.rows, updated)
        new = choose(updated, optax.apply_updates(trained, updates), trained)
        return new, new_state

    with jax.named_scope("jaxmem.update"), naming_axis(axes):
        if tables is None or updated is None:
            new, opt_state = finished(updated)
        else:  # a choice between two tables would need both of them
            same = lambda: (trained, opt_state)
            new, opt_state = jax.lax.cond(updated, lambda: finished(None), same)
    model_state = replicated(states[0], model_state, updated, axes)
    overwritten = replicated(states[1], overwritten, updated, axes, jax.lax.pmax)
    new_params = put_together(new, overwritten, params)
    metrics = _metrics(results, weights, options)
    return MiniBatchResult(new_params, opt_state, model_state, metrics, updated)


def _check_axes(params, axes: Axes) -> None:
    """ValueError outside of a map over `axes`, or with parameters sharded over them."""
    try:
        for name in axes:
            jax.lax.axis_size(name)
    except NameError as error:
        raise ValueError(
            f"microbatch(axis_name={axis_text(axes)}): {error}. Call the step inside "
            "jax.shard_map (or vmap) over that axis, under a jax.jit round both; under "
            "jit alone sharded arrays need no axis_name"
        ) from None
    for path, x in jax.tree.leaves_with_path(params):
        if varying_axes(x) & {*axes}:
            raise ValueError(
                f"params{keystr(path)} varies over axis_name={axis_text(axes)}: a step "
                "takes parameters that are replicated over it, in_specs P()"
            )


def _scan(body: Callable, carry, items, n: int):
    """`lax.scan`, without a loop where there is one micro-batch."""
    if n > 1:
        return jax.lax.scan(body, carry, items)
    carry, result = body(carry, jax.tree.map(lambda x: x.squeeze(0), items))
    return carry, jax.tree.map(lambda x: x[None], result)


def _gradient(loss_fn: Callable) -> Callable:
    return jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)


def _body(
    gradient: Callable, accumulator: Accumulator, options: StepOptions, params
) -> Callable:
    def body(carry, item):
        accumulated, (model_state, overwritten) = carry
        batch, key, share = item
        out, (grads, written) = gradient(params, overwritten, model_state, batch, key)
        loss, (new_model_state, aux) = out
        keep = _keep(options.skip_nonfinite, loss, (grads, written), share)
        with jax.named_scope("jaxmem.accumulate"), naming_axis(options.axis_name):
            accumulated, rows = accumulator.update(accumulated, grads, share, keep)
        states = choose(keep, (new_model_state, written), (model_state, overwritten))
        return (accumulated, states), MicroBatchResult(loss, aux, keep, rows)

    return body


def _keep(skip: str | None, loss, grads, share):
    """Whether this micro-batch counts; None for always."""
    # The mean over the tokens of a micro-batch without weight is 0/0.
    checks = [] if share is None else [share > 0]
    if skip is not None:
        checks.append(jnp.isfinite(loss))
    if skip == "gradients":
        checks.append(all_finite(grads))
    return jnp.stack(checks).all() if checks else None


def _metrics(
    results: MicroBatchResult, weights, options: StepOptions
) -> dict[str, Any]:
    n, axes = options.n, options.axis_name
    weights = jnp.ones((n,)) if weights is None else weights
    keep = results.keep
    if keep is not None:
        weights = jnp.where(keep, weights, jnp.zeros_like(weights))
    whole = total(weights.sum(), axes)
    mean = lambda x: _mean(x, weights, keep, whole, axes)
    metrics = {"loss": mean(results.loss), **jax.tree.map(mean, results.aux)}
    if keep is not None and options.skip_nonfinite is not None:
        metrics["skipped"] = total(jnp.sum(~keep, dtype=jnp.int32), axes)
    return metrics


def _mean(values, weights, keep, whole, axes):
    """Over axis 0 and all devices, in float32 or wider; NaN if none counts."""
    dtype = accumulation_dtype(values)
    spread = lambda x: jax.lax.broadcast_in_dim(x, values.shape, (0,))
    terms = values.astype(dtype) * spread(weights.astype(dtype))
    if keep is not None:
        terms = jnp.where(spread(keep), terms, jnp.zeros_like(terms))
    return total(terms.sum(0), axes) / whole.astype(dtype)
