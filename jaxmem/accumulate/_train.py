"""The step itself, on plain pytrees: one scan over micro-batches, then one update.

The parameters stay as they are until the scan is over. The last micro-batch is not
taken out of it: the update is elementwise in the moments and needs no gradient.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmem.accumulate._batches import shares_of, split_batch, split_keys, weights_of
from jaxmem.accumulate._devices import any_of, check_axes, one_of, total
from jaxmem.accumulate._options import Options
from jaxmem.accumulate._overwritten import put_together, take_apart
from jaxmem.accumulate._trees import all_finite, choose, wide
from jaxmem.accumulate._ways import Way, naming_axis, way_for
from jaxmem.optim._devices import own


class Trained(NamedTuple):
    """`taken` is a bool scalar, or None for always: whether there was an update."""

    params: Any
    opt_state: Any
    model_state: Any
    metrics: dict[str, Any]
    taken: Any


class Seen(NamedTuple):
    """Of each micro-batch: its loss, its aux, and whether it was kept."""

    loss: Any
    aux: dict[str, Any]
    keep: Any


def train(
    loss_fn: Callable,
    tx: optax.GradientTransformation,
    options: Options,
    params,
    opt_state,
    model_state,
    batch,
    rng,
) -> Trained:
    """One mini-batch. `loss_fn` is in the one form of `_loss.py`."""
    n, axes = options.n, options.axis_name
    check_axes(params, axes)
    batches, keys = split_batch(batch, n), split_keys(rng, n, axes)
    weights = weights_of(options.weight_fn, batches, n)
    shares = None if weights is None else shares_of(weights, axes)
    trained, overwritten = take_apart(params)
    way = way_for(tx, trained, opt_state, options)
    body = _body(_of_parts(loss_fn, params), way, options, own(trained, axes))
    states = own((model_state, overwritten), axes)
    (carry, states), seen = _over(body, (way.start, states), (batches, keys, shares), n)
    taken = any_of(seen.keep, axes)
    with jax.named_scope("jaxmem.update"), naming_axis(axes):
        updates, opt_state = way.finish(carry, taken)
        new = choose(taken, optax.apply_updates(trained, updates), trained)
    model_state = one_of(states[0], model_state, taken, axes)
    overwritten = one_of(states[1], overwritten, taken, axes, jax.lax.pmax)
    new_params = put_together(new, overwritten, params)
    metrics = _metrics(seen, weights, options)
    return Trained(new_params, opt_state, model_state, metrics, taken)


def _of_parts(loss_fn: Callable, params) -> Callable:
    """The loss of what is trained and, as a second argument, what is overwritten."""

    def loss(trained, overwritten, *others):
        return loss_fn(put_together(trained, overwritten, params), *others)

    return loss


def _over(body: Callable, carry, items, n: int):
    """`lax.scan`, without a loop where there is one micro-batch."""
    if n > 1:
        return jax.lax.scan(body, carry, items)
    carry, seen = body(carry, jax.tree.map(lambda x: x.squeeze(0), items))
    return carry, jax.tree.map(lambda x: x[None], seen)


def _body(loss_fn: Callable, way: Way, options: Options, params) -> Callable:
    gradient = jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)

    def body(carry, item):
        taken_in, (model_state, overwritten) = carry
        batch, key, share = item
        out, (grads, written) = gradient(params, overwritten, model_state, batch, key)
        loss, (new_model_state, aux) = out
        keep = _keep(options.skip_nonfinite, loss, (grads, written), share)
        with jax.named_scope("jaxmem.accumulate"), naming_axis(options.axis_name):
            taken_in = way.add(taken_in, grads, share, keep)
        states = choose(keep, (new_model_state, written), (model_state, overwritten))
        return (taken_in, states), Seen(loss, aux, keep)

    return body


def _keep(skip: str | None, loss, grads, share):
    """None, or whether this micro-batch counts.

    One of no weight does not: the mean over its no tokens is 0/0.
    """
    checks = [] if share is None else [share > 0]
    if skip is not None:
        checks.append(jnp.isfinite(loss))
    if skip == "gradients":
        checks.append(all_finite(grads))
    return jnp.stack(checks).all() if checks else None


def _metrics(seen: Seen, weights, options: Options) -> dict[str, Any]:
    n, axes = options.n, options.axis_name
    weights = jnp.ones((n,)) if weights is None else weights
    keep = seen.keep
    if keep is not None:
        weights = jnp.where(keep, weights, jnp.zeros_like(weights))
    whole = total(weights.sum(), axes)
    mean = lambda x: _mean(x, weights, keep, whole, axes)
    metrics = {"loss": mean(seen.loss), **jax.tree.map(mean, seen.aux)}
    if keep is not None and options.skip_nonfinite is not None:
        metrics["skipped"] = total(jnp.sum(~keep, dtype=jnp.int32), axes)
    return metrics


def _mean(values, weights, keep, whole, axes):
    """Over axis 0 and all devices, in float32 or wider; NaN where nothing was kept."""
    dtype = wide(values.dtype)
    over = lambda x: jax.lax.broadcast_in_dim(x, values.shape, (0,))
    parts = values.astype(dtype) * over(weights.astype(dtype))
    if keep is not None:
        parts = jnp.where(over(keep), parts, jnp.zeros_like(parts))
    return total(parts.sum(0), axes) / whole.astype(dtype)
